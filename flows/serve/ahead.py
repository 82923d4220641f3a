"""Compile ahead of time what `nautile chat` and `nautile serve` begin with, for a model that is still to be trained."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.flows.chat import Chat, ChatAnswer, ChatSettings, chat_engine
from nautile.flows.serve import QUEUE, SLOTS
from nautile.model.nautile import initialise
from nautile.model.runtimes.load import load_runtime
from nautile.model.weights.files import save_weights

# Prompts are padded to a quarter, a half or all of the room for one: these take a half and all in the default run.
QUESTIONS = ("What is 3 + 4?", "Now, how many legs are there in total if you have 3 dogs, 2 insects?")


def compile_first_replies(model: ModelConfig, tokenizer: TokenizerConfig) -> None:
    """Begin a chat and a server as their commands do with their defaults, with random weights of the same shapes."""
    params = initialise(model, 0)
    with TemporaryDirectory() as folder:
        save_weights(Path(folder), params, model, tokenizer)
        loaded = load_runtime("jax", Path(folder))
    for settings in (ChatSettings(), ChatSettings(temperature=0.0)):
        chat = Chat(loaded, settings)
        for question in QUESTIONS:
            with suppress(ConfigError):  # a small context has no room for it
                next(chat.ask(ChatAnswer(question)))
    engine = chat_engine(loaded, SLOTS, QUEUE)
    engine.start(lambda events: None)
    while not engine.ready.wait(1) and engine.failure is None:
        pass
    engine.close()
