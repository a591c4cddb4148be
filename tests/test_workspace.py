"""Handles, tables and what passes between agents by reference."""

from swarm.types import Artifact
from swarm.workspace import Workspace

QUESTION = Artifact("airports in Ohio", cells={"text": "List all airports in Ohio."})
PAGE = Artifact("Akron", url="w/7", cells={"a": "1,228", "b": "Akron|Canton"})


def workspace(*items: Artifact) -> Workspace:
    return Workspace((QUESTION, *items))


def test_an_artifact_is_shown_by_its_handle_and_goes_by_it_when_seen_again():
    ws, first = workspace().show(("hit ", Artifact("Akron", url="w/7"), "\n"))
    ws, second = ws.show((PAGE,))
    assert first == "hit [Doc #1](w/7) Akron\n"
    assert second == "#1"
    assert ws.items[1].cells["a"] == "1,228"


def test_after_a_rewrite_a_document_that_no_text_labels_is_written_out_again_once():
    ws = workspace(PAGE, Artifact("Canton", url="w/9")).forgotten(["see [Doc #2](w/9) Canton and #1"])
    ws, text = ws.show((PAGE, Artifact("Canton", url="w/9"), PAGE))
    assert text == "[Doc #1](w/7) Akron#2#1"


def test_a_row_is_kept_with_its_references_resolved():
    ws = workspace(PAGE).written("found it\n| #1 | #1.a | N/A |\n")
    assert ws.rows == (("Akron", "1,228", "N/A"),)


def test_a_reference_to_nothing_stays_as_it_was_written():
    assert workspace(PAGE).written("| #9 | #1.z |").rows == (("#9", "#1.z"),)


def test_an_escaped_pipe_belongs_to_its_cell_and_a_rule_line_is_no_row():
    ws = workspace(PAGE).written("| a \\| b | #1.b |\n|---|---|")
    assert ws.rows == (("a | b", "Akron|Canton"),)


def test_an_answer_merges_tables_by_handle_in_the_order_named_without_repeats():
    ws = workspace(Artifact("x", rows=(("1",), ("2",))), Artifact("y", rows=(("2",), ("3",))))
    assert ws.table("#2 #1") == (("2",), ("3",), ("1",))
    assert ws.table("#7 and #1, see #1") == (("1",), ("2",))


def test_own_rows_are_handed_in_by_name_or_by_writing_them_in_the_answer():
    ws = workspace().written("| 1 |")
    assert ws.table("#rows") == (("1",),)
    assert ws.table("nothing") == ()
    assert ws.written("| 2 |").table("| 2 |") == (("1",), ("2",))


def test_a_cell_reference_in_an_answer_is_not_a_table():
    ws = workspace(Artifact("x", rows=(("1",),)))
    assert ws.table("see #1.a") == ()


def test_a_prompt_for_another_agent_carries_what_its_handles_mean():
    text = workspace(PAGE).expand("#0 #1 p2")
    assert text == "#0 #1 p2\n#0: List all airports in Ohio.\n#1: [Doc #1](w/7) Akron"


def test_a_child_starts_with_the_handles_and_nothing_else():
    ws = workspace(PAGE).written("| 1 |")
    assert ws.child() == workspace(PAGE)


def test_a_query_and_an_address_may_be_handles():
    ws = workspace(PAGE)
    assert ws.text("#0 north") == "airports in Ohio north"
    assert (ws.url("#1"), ws.url(" w/9 "), ws.url("#5")) == ("w/7", "w/9", "#5")
