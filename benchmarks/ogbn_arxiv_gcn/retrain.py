"""The settings that an earlier record chose, trained with the noise of today's bound.

    python -m benchmarks.ogbn_arxiv_gcn.retrain --data-dir DIR [--earlier FILE]

The earlier record was made with the noise of a looser bound of what a node can change,
`results_by_joint_convexity.jsonl`. Its settings are not searched for again, but trained
with the least noise of the exact bound, with the same seeds. Trainings whose noise is
as it was, those without privacy and those on nodes alone, are taken over. Every
training is written down as it ends, and found there by a later call.
"""

import argparse
import json
import pathlib

import rich.progress

from benchmarks.ogbn_arxiv_gcn import data, run, table
from benchmarks.ogbn_arxiv_gcn.settings import Setting


def _has_the_same_noise(row: run.Row) -> bool:
    setting = row["setting"]
    return setting["target_epsilon"] is None or setting["max_memberships"] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--earlier", type=pathlib.Path, default=table.EARLIER)
    parser.add_argument("--output", type=pathlib.Path, default=run.RESULTS)
    arguments = parser.parse_args()
    graph = data.load(arguments.data_dir)
    earlier = [json.loads(line) for line in arguments.earlier.read_text().splitlines()]
    results = run.Results(arguments.output, graph)
    for row in filter(_has_the_same_noise, earlier):
        if not results.find(Setting(**row["setting"]), row["seed"]):
            results.take_over(row)
    chosen = sorted(
        (row for rows in table.lines(earlier).values() for row in rows),
        # With every seed all settings, so that what is cut off is of use.
        key=lambda row: row["seed"],
    )
    laboratory = run.Laboratory(graph)
    for row in rich.progress.track(chosen, "trainings"):
        setting = Setting(**row["setting"])
        if not results.find(setting, row["seed"]):
            results.add(run.train(laboratory, setting, row["seed"]))


if __name__ == "__main__":
    main()
