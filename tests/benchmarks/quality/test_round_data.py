"""The benchmark of preparing a round's data, shortened."""

from __future__ import annotations

from pathlib import Path

from benchmarks.quality.training import round_data


def test_a_round_takes_less_memory_than_a_table_of_its_events(tmp_path: Path) -> None:
    """Memory does not grow with the archive, and the files are the same."""
    growths = []
    for events in (250_000, 2_000_000):
        (tmp_path / str(events)).mkdir()
        found, same = round_data.measure(events, tmp_path / str(events))
        assert same
        assert found["pieces"]["held_out"] > 0
        growths.append({way: one["peak"] - one["before"] for way, one in found.items()})
    few, many = growths
    assert many["pieces"] - few["pieces"] < 0.75 * (many["whole"] - few["whole"])
