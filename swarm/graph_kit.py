"""What of LangGraph is used here, by name. The one file that imports it: an upgrade that breaks anything breaks this.

Not here: what is done with it (`swarm.stepper`, and the graphs of `recipes.graphs`).
"""
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.config import get_config
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send

__all__ = [
    "END",
    "START",
    "CompiledStateGraph",
    "JsonPlusSerializer",
    "Send",
    "SqliteSaver",
    "StateGraph",
    "ToolNode",
    "get_config",
]
