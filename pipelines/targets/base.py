"""The target VLM of any family: it reads prompts, answers, gives up its hidden states, and verifies.

Shapes: B samples, L positions, S committed positions, N tokens of one decoding step, K committed rows,
A rotary axes, D hidden width, V vocabulary.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from vlmdistill.drafters.base import Batch, Head
from vlmdistill.pipelines.targets.batching import Halving, pad
from vlmdistill.pipelines.targets.capture import DTYPES, Transcript, samples
from vlmdistill.pipelines.targets.decoding import Decoder
from vlmdistill.pipelines.targets.facts import target_info
from vlmdistill.pipelines.targets.family import Family, Inputs, Visual, perceive
from vlmdistill.pipelines.targets.fingerprint import Fingerprint, code_version, fingerprint
from vlmdistill.pipelines.targets.layers import causal, run_layers
from vlmdistill.pipelines.targets.prompt import Messages, Prompt, Response, encode
from vlmdistill.pipelines.targets.sampling import Chance, Rows, answers
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.schema import Feature, Provenance, Sample, TargetInfo

HIDDEN_TEXT = Feature("hidden", "text")
UNREADABLE = "the stock model cannot read these prompts in one batch"


class VisionLanguageTarget:
    """A loaded target. Made by `loading.load`; also the `Target` that the decoder sees."""

    def __init__(
        self, *, name: str, folder: Path, family: Family, model: Any, processor: Any, compiled: bool = False
    ):
        self.name = name
        self.folder = folder
        self.family = family
        self.model = model
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._text = model.model.language_model
        self._head: Tensor = model.get_output_embeddings().weight
        self._checked = False
        self._compiled = compiled
        self._answering, self._capturing = Halving(), Halving()
        self._prompt: Prompt | None = None  # the last one that was prefilled
        # What a checkpoint advises (greedy, top_k, repetition penalty) would reach every `generate`.
        eos_ids = self.info.eos_ids
        pad_id = self.tokenizer.pad_token_id
        self._pad_id = int(pad_id if pad_id is not None else eos_ids[0])
        model.generation_config = transformers.GenerationConfig(
            eos_token_id=list(eos_ids), pad_token_id=self._pad_id
        )

    # What it is

    @cached_property
    def info(self) -> TargetInfo:
        """The facts a drafter is built from."""
        return target_info(self.name, self.family, self.model, self.tokenizer)

    @property
    def head(self) -> Head:
        """The frozen tables, on the target's device."""
        return Head(embed_VD=self.model.get_input_embeddings().weight, lm_head_VD=self._head)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Hashes of configuration, weights, processor and template; `str()` of it is one word."""
        return fingerprint(self.folder, self.processor.chat_template)

    @property
    def dtype_name(self) -> str:
        """What it runs in, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    def provenance(self, features: Collection[Feature], dtype: str, sampling: str = "") -> Provenance:
        """What a store of these features has to remember."""
        print_ = self.fingerprint
        return Provenance(
            target=self.name,
            config_hash=print_.config,
            weights_hash=print_.weights,
            processor_hash=print_.processor,
            template_hash=print_.template,
            features=tuple(sorted(feature.name for feature in features)),
            dtype=dtype,
            revision=print_.revision,
            sampling=sampling,
            code_version=code_version(),
        )

    # What it reads and answers

    def encode(self, messages: Messages) -> Prompt:
        """Read a conversation; DataError names what cannot be used. See `prompt.encode`."""
        return encode(
            messages,
            family=self.family,
            model=self.model,
            processor=self.processor,
            max_length=self.info.max_position,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[Response]:
        """Answer a batch: greedily at temperature 0, else sampled from the target's own distribution.

        The same prompts, settings and seed give the same answers. When the GPU's memory runs out the
        batch is halved.
        """
        if max_new_tokens < 1 or not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
            raise DataError(
                f"cannot answer with max_new_tokens {max_new_tokens} (at least 1), "
                f"temperature {temperature} (at least 0), top_p {top_p} (above 0, up to 1)"
            )
        chance = Chance(temperature, top_p, seed)
        return self._answering(
            list(prompts),
            lambda prompt: prompt.length + max_new_tokens,
            lambda part: self._generate(part, max_new_tokens, chance),
        )

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt], most: int, chance: Chance) -> list[Response]:
        layers, lengths = self._decoder.layers, [prompt.length for prompt in prompts]
        draw = chance.begin(self.device)
        rows = Rows(layers, lengths)
        states = self._states(prompts, [Transcript.of(prompt) for prompt in prompts], (), cache=rows)
        ends_B = torch.tensor(lengths, device=self.device) - 1
        hidden_BD = states["hidden"][torch.arange(len(prompts), device=self.device), ends_B]
        rope_B = torch.tensor([prompt.next_rope for prompt in prompts], device=self.device)
        said = answers(
            layers, rows, hidden_BD, rope_B, lambda h_BD: draw(self.logits(h_BD)), self.info.eos_ids, most
        )
        return [self._response(ids) for ids in said]

    @torch.inference_mode()
    def reference(self, prompt: Prompt, *, max_new_tokens: int) -> Response | None:
        """The greedy answer of the stock model's own `generate`: what decoding is checked against.

        None where the stock model cannot read the prompt.
        """
        inputs = self._stock_inputs([prompt])
        if inputs is None:
            return None
        config = transformers.GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(self.info.eos_ids),
            pad_token_id=self._pad_id,
        )
        out_1L = self.model.generate(**inputs, generation_config=config)
        return self._response(out_1L[0, prompt.length :].tolist())

    def _response(self, ids: list[int]) -> Response:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        stopped = ids[-1] in self.info.eos_ids
        return Response(ids=tuple(ids), finish="stop" if stopped else "length", text=text)

    def _stock_inputs(self, prompts: Sequence[Prompt]) -> dict[str, Tensor] | None:
        """A left-padded batch as the stock model takes it; None where it cannot read these in one."""
        visual = self.family.stock(self.family.collate([prompt.inputs for prompt in prompts]))
        if visual is None:
            return None
        inputs = {
            "input_ids": pad([prompt.ids_L for prompt in prompts], self._pad_id, left=True),
            "attention_mask": pad([torch.ones_like(prompt.ids_L) for prompt in prompts], 0, left=True),
        }
        if self.family.grids:
            inputs["mm_token_type_ids"] = pad([prompt.kind_L for prompt in prompts], 0, left=True)
        return self._placed({**inputs, **visual})

    def _placed(self, inputs: Inputs) -> dict[str, Tensor]:
        """On the device, pixels in the model's dtype; the seconds between frames stay exact."""
        placed = {name: value.to(self.device, non_blocking=True) for name, value in inputs.items()}
        pixels = {
            name: value.to(self.dtype) for name, value in placed.items() if name.startswith("pixel_values")
        }
        return {**placed, **pixels}

    # What it gives up for training

    def capture(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[Sequence[int]],
        features: Collection[Feature],
        dtype: str = "bfloat16",
        keys: Sequence[str] | None = None,
    ) -> list[Sample]:
        """Run prompts with their responses teacher-forced, in one batch, and keep what is asked for.

        Raises TargetError for a layer that the target does not have, and when its LM head does not turn
        the captured states into its own logits.
        """
        if dtype not in DTYPES:
            raise DataError(f"features are stored as {', '.join(DTYPES)}, not as {dtype}")
        readable = [p for p in prompts if self.family.stock(p.inputs) is not None]
        if readable and not self._checked:
            self.check(min(readable, key=lambda prompt: prompt.length))
        items = list(zip(prompts, responses, keys or [""] * len(prompts), strict=True))
        return self._capturing(
            items,
            lambda item: item[0].length + len(item[1]),
            lambda part: self._capture(part, features, dtype),
        )

    @torch.inference_mode()
    def _capture(
        self, items: Sequence[tuple[Prompt, Sequence[int], str]], features: Collection[Feature], dtype: str
    ) -> list[Sample]:
        sequences = [Transcript.of(prompt, response) for prompt, response, _ in items]
        states = self._states([item[0] for item in items], sequences, {f.source for f in features})
        return samples(sequences, [item[2] for item in items], states, features, dtype)

    def _states(
        self,
        prompts: Sequence[Prompt],
        sequences: Sequence[Transcript],
        sources: Collection[str],
        **cache: Any,
    ) -> dict[str, Tensor]:
        """States [B, L, D] of a right-padded batch. No token sees one to its right: padding needs no mask."""
        hidden_BLD, rope_ABL, visual_BL, visual = self._read(prompts, sequences)
        return self._run(hidden_BLD, rope_ABL, sources, visual_BL=visual_BL, visual=visual, **cache)

    def _read(
        self, prompts: Sequence[Prompt], sequences: Sequence[Transcript]
    ) -> tuple[Tensor, Tensor, Tensor, Visual | None]:
        """Embeddings [B, L, D] with what is seen in its place, positions [A, B, L], where, and what."""
        ids_BL = pad([s.ids_L for s in sequences], self._pad_id).to(self.device)
        rope_ABL = pad([s.rope_AL for s in sequences], 0).transpose(0, 1).to(self.device)
        visual_BL = pad([s.visual_L for s in sequences], 0).to(self.device)
        hidden_BLD = self._text.embed_tokens(ids_BL)
        inputs = self.family.collate([prompt.inputs for prompt in prompts])
        visual = None
        if inputs:
            kind_U = torch.cat([sequence.kind_L[sequence.visual_L] for sequence in sequences]).to(self.device)
            try:
                visual = perceive(self.family, self.model, self._placed(inputs), kind_U)
            except TargetError as error:
                raise TargetError(f"{self.folder}: {error}") from None
            hidden_BLD[visual_BL] = visual.embed_UD.to(hidden_BLD.dtype)
        return hidden_BLD, rope_ABL, visual_BL, visual

    def _run(
        self, hidden_BLD: Tensor, rope_ABL: Tensor, sources: Collection[str], **more: Any
    ) -> dict[str, Tensor]:
        eager = self._text.config._attn_implementation == "eager"
        mask = causal(hidden_BLD.shape[1], hidden_BLD) if eager else None
        return run_layers(self._text, hidden_BLD, rope_ABL, mask=mask, sources=sources, **more)

    @torch.inference_mode()
    def check(self, prompt: Prompt) -> None:
        """Compare with the stock model, once: the LM head turns captured states into its logits.

        Raises TargetError when it does not; nothing trained from such states could draft.
        """
        inputs = self._stock_inputs([prompt])
        if inputs is None:
            raise DataError(UNREADABLE)
        hidden_LD = self._states([prompt], [Transcript.of(prompt)], ())["hidden"][0]
        mine_V = self.logits(hidden_LD[-1:])[0]
        stock_V = self.model(**inputs, logits_to_keep=1).logits[0, -1].float()
        allowed = (1e-3 if self.dtype == torch.float32 else 5e-2) * float(stock_V.abs().max())
        worst = float((mine_V - stock_V).abs().max())
        if not worst <= allowed:
            raise TargetError(
                f"{self.folder}: the captured states do not give the target's own logits "
                f"(difference {worst:.3g}, allowed {allowed:.3g}): this checkpoint is not served"
            )
        self._checked = True

    # What the decoder asks of it

    @cached_property
    def _decoder(self) -> Decoder:
        with torch.inference_mode(False), torch.no_grad():  # the weights stay usable in training
            return Decoder(self._text, compiled=self._compiled)

    def prefill(self, prompt: Prompt, features: Collection[Feature] = ()) -> Batch:
        """Forget the last sequence, run a prompt, and return its tokens with `features` and hidden.text."""
        decoder, transcript = self._decoder, Transcript.of(prompt)
        self._prompt = prompt
        asked = {HIDDEN_TEXT, *features}
        with torch.inference_mode():
            cache = decoder.start(prompt.length, prompt.next_rope)
            states = self._states([prompt], [transcript], {f.source for f in asked}, cache=cache)
            cache.length = prompt.length
            return transcript.batch({name: state[0] for name, state in states.items()}, asked)

    @torch.inference_mode()
    def extend(
        self,
        ids_N: Tensor,
        depth_N: Tensor,
        visible_NN: Tensor | None = None,
        sources: Collection[str] = ("hidden",),
    ) -> dict[str, Tensor]:
        """One forward pass over N tokens after the committed prefix: states by source, each [N, D].

        Token n stands `depth_N[n]` positions after the last committed one (the first at depth 1) and
        attends to the prefix and the tokens of `visible_NN[n]` (bool, itself included; None: causal).
        Nothing is committed; `hidden` is always among the states.
        """
        return self._decoder.extend(ids_N, depth_N, visible_NN, sources)

    @torch.inference_mode()
    def commit(self, rows_K: Tensor) -> None:
        """Keep those rows of the last `extend`, in that order, as part of the prefix; drop the others."""
        self._decoder.commit(rows_K)

    @torch.inference_mode()
    def attention(self) -> Tensor:
        """How much the text after the last visual token looks at each visual token: float32 [U].

        Mean over that text, all heads and layers. To be called after `prefill`, before anything is committed.
        """
        assert self._prompt is not None, "prefill comes first"
        prompt = self._prompt
        if not prompt.spans:
            return torch.zeros(0, device=self.device)
        first = prompt.spans[-1].start + prompt.spans[-1].length
        ids_N = prompt.ids_L[first:].to(self.device)
        weight_S = self._decoder.attention(ids_N, prompt.rope_AL[0, first:].to(self.device), first)
        return weight_S[prompt.visual_L.to(self.device)]

    @torch.inference_mode()
    def without(self, keep_U: Tensor) -> Decoder:
        """A second sequence over the same weights: the last prompt with only those visual tokens (bool)."""
        assert self._prompt is not None, "prefill comes first"
        prompt = self._prompt
        embed_1LD, rope_A1L, visual_1L, visual = self._read([prompt], [Transcript.of(prompt)])
        keep_L = ~visual_1L[0]
        keep_L[visual_1L[0]] = keep_U.to(self.device)
        if visual is not None:
            kept_U = keep_U.to(self.device)
            visual = Visual(visual.embed_UD[kept_U], tuple(level[kept_U] for level in visual.deepstack))
        reader = Decoder(self._text, self._decoder.layers)
        cache = reader.start(int(keep_L.sum()), prompt.next_rope)
        self._run(
            embed_1LD[:, keep_L],
            rope_A1L[:, :, keep_L],
            (),
            visual_BL=visual_1L[:, keep_L],
            visual=visual,
            cache=cache,
        )
        cache.length = int(keep_L.sum())
        return reader

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The LM head on `hidden` states, float32 [N, V]."""
        return F.linear(hidden_ND, self._head).float()
