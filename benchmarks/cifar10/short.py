"""CNN5 for 20 epochs: every optimizer at three epsilons, with a search of its own.

    python -m benchmarks.cifar10.short --data-dir DIR [--method DP-Adam]
    python -m benchmarks.cifar10.short      # prints the tables

The network, the batches, the clip norm and the views are those of `published`, the
steps 960, and the noise is calibrated for them. All learning rates are in one unit,
that of Adam, in which the best of one epsilon is that of another: DP-SGD's is
multiplied by (1 - momentum) / noise_stddev, as DP-Adam's is where noise is all that its
second moment sees, and floors are relative to the noise.

The search, `benchmarks.rates`, has four trials for each optimizer at epsilon 3,
learning rates a factor of two apart, trained on 45,000 images and scored on the other
5,000. The best is tested at epsilon 1, 3 and 7, with three seeds.

The control has the floor without the subtraction. The floor of DP-AdamBC, with nothing
subtracted, is below every second moment, so that control would be DP-Adam. Here it is
where the correction has it, at the variance of the noise and one deviation, so the same
coordinates are at the floor.

That is 78 trainings of 15 to 40 minutes of a core each, those of the control last.
Several calls, of some optimizers each, may write to one record. Trainings go on where
they ended.
"""

import pathlib
from collections.abc import Sequence

from benchmarks import rates, records
from benchmarks.cifar10 import cnn5_training, data
from benchmarks.cifar10.cnn5_training import Setting
from dpadambc import accounting

RESULTS = pathlib.Path(__file__).with_name("short.jsonl")

EPOCHS = 20

# The second of each grid comes first. They are where the papers' learning rates for as
# much noise are: the corrected steps are longer at the same rate. The fourth came when
# the third was the best of every Adam, the largest of three.
PLAIN = (2e-3, 1e-3, 4e-3, 8e-3)
CORRECTED = (4e-4, 2e-4, 8e-4, 1.6e-3)
LEARNING_RATES = {
    "DP-AdamW": PLAIN,
    "DP-AdamW-BC": CORRECTED,
    "DP-AdamBC": CORRECTED,
    "DP-SGD": (4e-3, 2e-3, 8e-3, 1e-3),
    "DP-Adam": PLAIN,
    "floor alone": PLAIN,
}
*OPTIMIZERS, CONTROL = LEARNING_RATES


def setting(method: str, target_epsilon: float, learning_rate: float) -> Setting:
    """Of 20 epochs."""
    options = {"per_noise": True} if method == "DP-SGD" else {}
    return Setting(method, target_epsilon, EPOCHS, learning_rate, options)


PLAN = rates.Plan(
    setting,
    LEARNING_RATES,
    epsilon_of_trials=3.0,
    other_epsilons=(1.0, 7.0),
    seeds=(0, 1, 2),
)


def _moments(rows: Sequence[records.Row]) -> str:
    last = [row["curve"][-1] for row in rows]
    cosines = [record.get("cosine_to_momentum") for record in last]
    shares = [record.get("share_at_floor") for record in last]
    if None in cosines:
        return "-"
    cell = f"{sum(cosines) / len(last):.2f}"
    return cell if None in shares else f"{cell}, {sum(shares) / len(last):.0%}"


def render(rows: Sequence[records.Row]) -> str:
    """All tables."""
    get = rates.reader(rows, cnn5_training.identity)
    mechanism = setting("DP-SGD", PLAN.epsilon_of_trials, 1.0).mechanism(45_000)
    number = len(LEARNING_RATES["DP-SGD"])
    tuned = accounting.tuned_epsilon(
        mechanism, cnn5_training.TARGET_DELTA, trials=accounting.Geometric(number)
    )
    return "\n\n".join(
        [
            "Test accuracy in percent:",
            PLAN.results_table(get, PLAN.accuracy),
            "Cosine of the last update to the first moment, and share at the floor:",
            PLAN.results_table(get, _moments),
            f"The trials, on validation images, at ε {tuned.of_one_trial:.2f} each. A"
            f" search of {number} trials of one optimizer, with keys of their own, were"
            " their number random (geometric) and only the best told, costs ε"
            f" {tuned.epsilon:.2f}; all {number} told would cost"
            f" {tuned.of_composition:.2f}. What was trained on all images comes on top."
            " (Here they share a key, for comparison: each ε is of one training.)",
            PLAN.trials_table(get),
        ]
    )


def main() -> None:
    parser = cnn5_training.options(__doc__, RESULTS)
    parser.add_argument(
        "--method", choices=LEARNING_RATES, nargs="+", default=tuple(LEARNING_RATES)
    )
    arguments = parser.parse_args()
    found = records.Records(arguments.output)
    if arguments.data_dir:
        cifar = data.load(arguments.data_dir)
        laboratory = cnn5_training.Laboratory(cifar, found, arguments.checkpoints)
        for methods in OPTIMIZERS, [CONTROL]:
            PLAN.run(laboratory.get, [x for x in methods if x in arguments.method])
    print(render(records.read(arguments.output)))


if __name__ == "__main__":
    main()
