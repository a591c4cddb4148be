"""An agent of Pydantic AI, with one tool of its own."""

import os
import sys

from pydantic_ai import Agent

agent = Agent(f"openai-chat:{os.environ['OPENAI_MODEL']}", system_prompt=("Work.", "Be brief."))


@agent.tool_plain
def echo(text: str) -> str:
    """Echo."""
    return text


if "--stream" in sys.argv:
    print(agent.run_stream_sync(sys.stdin.read()).get_output())
else:
    print(agent.run_sync(sys.stdin.read()).output)
