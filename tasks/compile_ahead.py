"""Compile programs of later stages and first replies ahead of time: `python -m nautile.tasks.compile_ahead FILE`.

The process runs only while the cores are otherwise idle. It writes the programs to the store's compilation cache. A
stage that begins before its programs are there compiles them itself, so results never depend on this process.
"""

import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nautile.common.processes import only_idle_time
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.store.layout import Layout
from nautile.tasks.engine.child_main import begin, keep_compiled
from nautile.tasks.engine.stage import declared, resolve

logger = logging.getLogger("nautile.tasks.compile_ahead")


@dataclass(frozen=True)
class AheadRequest:
    """The arguments of the process.

    parent: id of the process with which it ends. steps: (stage, section, staging folder) of each later step, in order.
    replies: reference of the function that compiles what a chat and a server begin with; called last.
    """

    parent: int
    store: str
    model: dict[str, Any]
    tokenizer: dict[str, Any]
    steps: list[tuple[str, dict[str, Any], str]]
    replies: str


def main(path: Path) -> None:
    """Compile the programs of the request's steps that have not begun."""
    request = AheadRequest(**json.loads(path.read_text(encoding="utf-8")))
    begin(request.parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # end at once: a Python handler would wait for the compilation
    only_idle_time()
    keep_compiled(Layout(request.store).compiled)
    tokenizer = TokenizerConfig.model_validate(request.tokenizer)
    model = ModelConfig.model_validate(request.model).with_tokenizer(tokenizer)  # as of a checkpoint that was loaded
    for stage, section, staging in request.steps:
        # Its staging folder exists, so the stage is at work: compiling the same beside it would only take its cores.
        if os.path.exists(staging):
            logger.info("%s has begun and compiles its own programs", stage)
            continue
        compile_stage(stage, section, model, tokenizer)
        logger.info("%s: compiled", stage)
    resolve(request.replies)(model, tokenizer)
    logger.info("the first replies of chat and serve: compiled")


def compile_stage(stage: str, section: dict[str, Any], model: ModelConfig, tokenizer: TokenizerConfig) -> None:
    """Compile the programs of a stage that declares how, configured by `section`."""
    if described := declared(stage):
        resolve(described.compile_ahead)(model, tokenizer, section[stage])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
