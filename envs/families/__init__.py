"""One module a family of facts: each turns an installed package into entities and groups.

Not here: anything that differs between worlds (see `envs.world`).
"""
