"""The command line with the scripted model as a process: `python fake_cli.py SECONDS_PER_TOKEN ARGS...`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.llm import FakeLLM
from paceline.cli import engine, main

pause = float(sys.argv.pop(1))
fake = FakeLLM("fake", answers={"long": "word " * 400}, on_token=lambda _count: time.sleep(pause))
engine.open_llm = lambda _options: fake
main()
