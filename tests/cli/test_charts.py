"""Charts print every number."""

import io

from rich.console import Console

from birkhoff.cli.charts import cell_style, mixing_matrix, sparkline

MIX = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.1, 0.2, 0.5, 0.2], [0.1, 0.1, 0.2, 0.6]]


def drawn(thing) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(thing)
    return console.export_text().splitlines()


def test_a_mixing_matrix_shows_every_number_and_the_sums():
    lines = drawn(mixing_matrix("layer 3", MIX, [0.5, 0.4, 0.3, 0.2], [1.5, 1.0, 0.5, 0.25]))
    assert lines[0].strip() == "layer 3"
    assert lines[1].split() == ["to", "0", "to", "1", "to", "2", "to", "3", "sum"]
    assert lines[3].split() == ["from", "1", "0.10", "0.60", "0.20", "0.10", "1.00"]
    assert lines[6].split() == ["sum", "1.00", "1.00", "1.00", "1.00"]
    assert lines[7].split() == ["read", "0.50", "0.40", "0.30", "0.20"]
    assert lines[8].split() == ["write", "1.50", "1.00", "0.50", "0.25"]


def test_cell_colour_grows_with_the_value():
    colours = [cell_style(value).bgcolor.triplet for value in (-1.0, 0.0, 0.5, 1.0, 7.0)]
    assert colours[0] == colours[1] and colours[3] == colours[4]
    assert colours[1].red < colours[2].red < colours[3].red


def test_sparkline_bars_are_proportional():
    assert sparkline([0.0, 1.0, 2.0, 4.0]) == " ▂▄█"
    assert sparkline([0.0, 0.0]) == "  " and sparkline([]) == ""
