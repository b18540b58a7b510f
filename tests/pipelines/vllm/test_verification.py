"""Settings of sampling reach every drafted token of their request."""

import torch

from vlmdistill.pipelines.vllm.plugin.verification import expand_batch_to_tokens


def test_each_drafted_token_has_the_value_of_its_request() -> None:
    value_B, end_B = torch.tensor([0.25, 0.0, 1.5, 2.5]), torch.tensor([2, 3, 3, 6])
    found = expand_batch_to_tokens(value_B, end_B, 6, replace_from=0, replace_to=1)
    assert found.dtype == value_B.dtype
    assert found.tolist() == [0.25, 0.25, 1.0, 2.5, 2.5, 2.5]
