"""What a drafter is given of its target."""

import torch

from vlmdistill.drafters.core.batch import Head
from vlmdistill.stores.loader.tensors import as_numpy
from vlmdistill.stores.schema import FrozenTables


def test_a_table_that_serves_as_both_is_in_memory_once() -> None:
    embed_VD = as_numpy(torch.randn(7, 4).to(torch.bfloat16))
    embed_VD.flags.writeable = False  # as the store maps it: torch has to copy
    tied = Head.of(FrozenTables(embed_VD, embed_VD, "bfloat16"))
    assert tied.lm_head_VD is tied.embed_VD
    other = Head.of(
        FrozenTables(embed_VD, embed_VD[::-1], "bfloat16"), dtype=torch.float64
    )
    torch.testing.assert_close(other.embed_VD, tied.embed_VD.double())
    torch.testing.assert_close(other.lm_head_VD, tied.embed_VD.double().flip(0))
