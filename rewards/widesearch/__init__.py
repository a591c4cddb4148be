"""WideSearch table scoring: `official` (to the digit), `strict` (without its defects), aggregation and dataset files.

Not here: any language model. A judge is passed in; the default one is plain equality.
"""
