"""What devices round: the measurement runs, and its record is of one."""

import json

from benchmarks.speed import models, rounding


def test_full_precision_is_exact_and_clipped_gradients_stay_below_the_clip():
    found = rounding.product((64, 70, 80), rounding.PRECISIONS["HIGHEST"])
    assert 0 < found["error"] < 1e-5 and found["microseconds"] > 0
    past = rounding.past_the_clip(models.mlp(8))
    assert all(-1e-5 < x <= 0 for x in past.values())


def test_the_table_has_all_that_is_on_record(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["rounding", "--table"])
    rounding.main()
    record = json.loads(rounding.RESULTS.read_text())
    lines = capsys.readouterr().out.splitlines()
    number = sum(map(len, record["products"].values())) + len(record["norms"])
    assert sum(line.startswith("|") for line in lines) == number + 4
    assert all(x <= 0 for row in record["norms"].values() for x in row.values())
