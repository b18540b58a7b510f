"""All benchmarks, one after the other: `python -m benchmarks`."""

from benchmarks import decode, store

decode.main()
store.main()
