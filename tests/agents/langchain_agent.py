"""An agent of LangChain: ChatOpenAI in the prebuilt loop, with one tool of its own."""

import os
import sys

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI


@tool
def echo(text: str) -> str:
    """Echo."""
    return text


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], streaming="--stream" in sys.argv)
agent = create_agent(model, [echo], system_prompt="Work.")
print(agent.invoke({"messages": [("user", sys.stdin.read())]})["messages"][-1].content)
