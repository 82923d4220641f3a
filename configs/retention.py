"""Which live artifacts `nautile store gc` may retire. Where the work is kept, not what it is: in no key."""

from pydantic import Field, NonNegativeFloat, PositiveInt

from configs.section import Section


class RetentionConfig(Section):
    """What stays. While neither `newest` nor `days` is given, every live artifact does.

    Given one, an artifact stays that any rule keeps, and whatever a kept one was made from, down to the first text.
    What one execution published stays or goes as a whole, for a stage is reused only if all of it is there.
    """

    newest: PositiveInt | None = None  # of each label (evaluate:align), so many of the latest
    days: NonNegativeFloat | None = None  # all that is younger
    kinds: tuple[str, ...] = Field(default=())  # these kinds, however old
    pins: tuple[str, ...] = Field(default=())  # these artifacts, by id

    @property
    def retires(self) -> bool:
        return self.newest is not None or self.days is not None
