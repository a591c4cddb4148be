"""`swarm-rl view RUN`: a local page with a run's curves, its rollouts, and each of them agent by agent.

    swarm-rl view runs/wide_search        also while it trains; Ctrl-C ends the page, never the run

Not here: the server (`recipes.view.server`) and the page (`recipes/view/page/`).
"""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio
from rich.console import Console

from recipes.arguments import parser_of
from recipes.debug.run import open_run
from recipes.view.fork import Forks
from recipes.view.run import RunView
from recipes.view.server import PORT, Viewer, serving


def view_command(argv: Sequence[str], console: Console) -> int:
    """Serves the page until Ctrl-C; the exit code."""
    words = (
        "Serves a page about a run on this machine alone: curves, rollouts, and every agent's transcript beside its\n"
        "place in time. Follows a run that trains. The address holds a key: whoever has it can read the run."
    )
    parser = parser_of("view", "RUN [--port N] [--no-browser]", words, "swarm-rl view runs/wide_search")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("--port", type=_port, help=f"the port of the page (default: {PORT}, or a free one)")
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    o = parser.parse_args(argv)
    forks = Forks(o.run, lambda: open_run(o.run))
    viewer = Viewer(RunView(o.run), forks)
    show = not o.no_browser and has_screen(sys.platform, os.environ)
    try:
        trio.run(_serve, viewer, o.port, show, console)
    except KeyboardInterrupt:
        console.print("closed")
    finally:
        forks.close()
    return 0


async def _serve(viewer: Viewer, port: int | None, show: bool, console: Console) -> None:
    async with serving(viewer, port):
        console.print(f"{viewer.view.path} is shown at\n\n  {viewer.address}\n\nCtrl-C closes it.", soft_wrap=True)
        if show:
            webbrowser.open(viewer.address)
        await trio.sleep_forever()


def has_screen(platform: str, environment: Mapping[str, str]) -> bool:
    """Whether a browser can be opened that takes no terminal."""
    return platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & environment.keys())


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}, want 0 to 65535")
    return int(text)
