"""What is read of a source, in words: what is not known is said, and is no number."""

from nautile.data.tokens.source_reading import SourceReading, reading_line, reading_rows

KNOWN = SourceReading("replies", fill=0.894, cropped_share=0.0, trained_share=0.4321, epochs=3.207)


def test_the_line_and_the_cells_of_a_source():
    assert reading_line({"synth": KNOWN}) == "synth: rows 89% full, 0% cropped, 43% of targets, 3.21 epochs"
    assert reading_rows({"synth": KNOWN}) == [("synth", "replies", "89%", "0%", "43%", "3.21")]


def test_what_is_not_known_is_no_number():
    assert reading_rows({"it": SourceReading("all")}) == [("it", "all", *["not known"] * 4)]
    assert reading_rows({"it": SourceReading("all", least_epochs=2.84)})[0][-1] == "at least 2.8"


def test_a_share_that_is_only_near_0_or_1_is_not_rounded_to_it():
    cells = reading_rows({"it": SourceReading("all", fill=0.9996, cropped_share=0.0004, trained_share=1.0)})[0]
    assert cells[2:5] == ("99.96%", "0.04%", "100%")


def test_the_facts_leave_out_what_is_not_known():
    assert KNOWN.facts() == {
        "train_on": "replies", "fill": 0.894, "cropped_share": 0.0, "trained_share": 0.4321, "epochs": 3.207,
    }  # fmt: skip
