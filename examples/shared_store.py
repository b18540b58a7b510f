"""Read a feature store that somebody shares, without a copy of it: a folder, an s3:// or an https:// address.

python -m examples.shared_store https://example.org/store
"""

import sys

import vlmdistill


def shared_store(address: str, samples: int = 100) -> dict[str, object]:
    """Read what enters the LM head for the responses of some samples; how much there is, and its size."""
    store = vlmdistill.open_store(address)
    keys = list(store)[:samples]
    tokens, squares = 0, 0.0
    for batch in vlmdistill.iterate_batches(store, features=["hidden.text"], keys=keys):
        response_TD = batch.feature("hidden", "text")[batch.response_T].float()
        tokens += len(response_TD)
        squares += float(response_TD.square().mean(-1).sum())
    return {
        "target": store.info.name,
        "features": ", ".join(map(str, store.provenance.features)),
        "samples": f"{len(keys)} of {len(store)}",
        "response tokens": tokens,
        "root mean square": (squares / tokens) ** 0.5,
    }


if __name__ == "__main__":
    sys.stdout.writelines(
        f"{name}: {value}\n" for name, value in shared_store(sys.argv[1]).items()
    )
