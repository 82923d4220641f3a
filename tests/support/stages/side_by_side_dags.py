"""DAGs over the stage of `tests.support.stages.side_by_side`, apart from it as its child processes import that file."""

from nautile.configs.schema import RunConfig
from nautile.flows.dag import Need, Step
from tests.support.stages.side_by_side import marked, section


def step(label: str, resource: str, *waits_for: str, needs: tuple[str, ...] = (), **more: object) -> Step:
    """A step that waits for the markers `waits_for` of others, and reads what `needs` write."""
    inputs = {name: Need(name, "mark") for name in needs}
    return Step(label, marked, section(label, resource, *waits_for, **more), inputs, resource)


def limited(config: RunConfig) -> list[Step]:
    """Three on the accelerator, of which the first two must meet, three on the network, one of which a fourth meets."""
    network = ("network1", "network2", "network3")
    return [
        step("first", "accelerator", "second.begun", seconds=0.3),
        step("second", "accelerator", "first.begun", seconds=0.3),
        step("third", "accelerator", seconds=0.3),
        step("text", "cpu", "network2.begun"),
        step("network1", "network", seconds=0.3),
        step("network2", "network", "text.begun", seconds=0.3),
        step("network3", "network", seconds=0.3),
        step("last", "cpu", needs=("first", "second", "third", "text", *network)),
    ]


def stuck(config: RunConfig) -> list[Step]:
    """Two that wait for what never comes."""
    return [step("text", "cpu", "never"), step("teachers", "network", "never")]


def broken(config: RunConfig) -> list[Step]:
    """`bad` fails while `long` works; `after_long` needs only that one, `after_bad` and `report` what failed."""
    return [
        step("bad", "cpu", "long.begun", fails=True),
        step("long", "network", "bad.begun", seconds=0.3),
        step("after_bad", "cpu", needs=("bad",)),
        step("after_long", "accelerator", needs=("long",)),
        step("report", "cpu", needs=("after_bad", "after_long")),
    ]


def unlimited(config: RunConfig) -> list[Step]:
    """One on a resource that the configuration does not know."""
    return [step("odd", "quantum")]
