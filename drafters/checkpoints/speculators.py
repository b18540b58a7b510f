"""An exported drafter in the format of speculators, which speculators and vLLM load without our code.

Its `config.json` has the layers' settings apart, and names the verifier and how many tokens are drafted.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vlmdistill.drafters.core.serving import ServedDrafter
from vlmdistill.stores.errors import TrainingError

ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}
"""By vLLM's method."""
OUTSIDE = (
    "target_hidden_size",
    "draft_vocab_size",
    "norm_before_residual",
    "eagle_aux_hidden_state_layer_ids",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
"""Settings that are not of the layers."""
OTHER_NAMES = (
    "architectures",
    "num_aux_hidden_states",
    "eagle_config",
    "dflash_config",
    "target_layer_ids",
    "num_target_layers",
    "is_causal",
)
"""Settings of other layouts, which have counterparts here."""


def in_speculators(served: ServedDrafter, tokens: int, target: str) -> ServedDrafter:
    """The same drafter with the settings and weights of that format, for a target and so many drafted tokens.

    TrainingError for what the format cannot say, so that it would load as another drafter.
    """
    method = served.method
    if method not in ARCHITECTURES:
        raise TrainingError(
            f"{served.feeding.drafter} has no counterpart in speculators: it has {', '.join(ARCHITECTURES)}"
        )
    if served.feeding.visual == "dropped":
        raise TrainingError(
            "this drafter reads text alone, which speculators cannot say: train one with --set context=all "
            "--set positions=expanded"
        )
    unknown = {name for name in served.weights if "." not in name} - {"d2t", "t2d"}
    if served.files or unknown:
        raise TrainingError(
            "this drafter has a learned mask, for which speculators has no place: train one with --set "
            "mask=ID, the id of a token"
        )
    settings = served.settings
    described: dict[str, Any] = {
        name: settings[name] for name in OUTSIDE if name in settings
    }
    if method != "eagle3":
        described |= _block_settings(served)
    layers = {
        name: value
        for name, value in settings.items()
        if name not in OUTSIDE + OTHER_NAMES
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return replace(
        served,
        engines=("vllm",),
        settings={
            "architectures": [ARCHITECTURES[method]],
            "speculators_model_type": method,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": method,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target, "architectures": []},
            },
            **described,
            "transformer_layer_config": layers,
        },
        weights={
            name.replace("midlayer.", "layers.0."): weight
            for name, weight in served.weights.items()
        },
    )


def _block_settings(served: ServedDrafter) -> Mapping[str, Any]:
    """Those of a block drafter: layers are counted by the states that enter them."""
    own = served.settings
    inputs = own.get("dflash_config", own)
    return {
        "draft_vocab_size": served.draft_vocabulary,
        "target_hidden_size": own["hidden_size"],
        "aux_hidden_state_layer_ids": [*served.layers],
        "mask_token_id": inputs["mask_token_id"],
        "sample_from_anchor": own.get("sample_from_anchor", False),
        # Of layers with a window, in speculators; vLLM reads it for all.
        "sliding_window_non_causal": True,
    }
