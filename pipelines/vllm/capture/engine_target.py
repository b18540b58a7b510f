"""Capture with vLLM what the target's own `capture` gives: the same samples, checked against it.

Shapes: B samples, L positions, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vlmdistill.pipelines.cluster.engine_environment import EngineName
from vlmdistill.pipelines.targets.capture import DTYPES, Transcript
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.encode import EncodedPrompt, EncodedResponse
from vlmdistill.pipelines.targets.families.family import IMAGE, VIDEO
from vlmdistill.pipelines.targets.loading import load_for_capture
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.targets.text_layers import tapped
from vlmdistill.pipelines.vllm.capture.engine_process import Captured, EngineProcess
from vlmdistill.pipelines.vllm.capture.wire import ROPE, Chosen, Draw, Medium, Submit
from vlmdistill.stores.errors import PromptError, TargetError
from vlmdistill.stores.loader.tensors import as_numpy, as_torch
from vlmdistill.stores.schema import Array, Feature, Sample, Span

ALLOWED = {
    "float32": 1e-3,
    "bfloat16": 5e-2,
    "float16": 5e-2,
}  # relative difference of states or logits
LOGPROBS = {
    "float32": 1e-3,
    "bfloat16": 0.1,
    "float16": 0.1,
}  # mean difference over a response
HIDDEN_TEXT = Feature("hidden", "text")
ADVICE = "capture this target with --engine transformers"


class EngineTarget:
    """A target that vLLM runs. `target` is the same one on the CPU: it encodes, norms and checks.

    Without features it only generates.
    """

    def __init__(
        self, target: TargetModel, features: Collection[Feature], batch_tokens: int
    ) -> None:
        self._target = target
        self._features = sorted(features)
        last = (
            target.info.num_layers
        )  # the number that vLLM gives to the output of the last layer
        taps = tapped({feature.source for feature in self._features}, last)
        self._layer_of = {
            source: layer for layer, sources in taps.items() for source in sources
        }
        self._layer_of["hidden"] = last  # the last row is checked, whatever is stored
        self._grown = {
            self._layer_of[f.source] for f in self._features if f.where == "text"
        } | {last}
        layers = tuple(sorted(set(self._layer_of.values()))) if features else ()
        devices = max(1, torch.cuda.device_count())
        self._engine = EngineProcess(
            target.folder, target.dtype_name, layers, batch_tokens, devices
        )

    @property
    def name(self) -> str:
        """The engine and its version, for the provenance."""
        return f"vllm {self._engine.version}"

    def capture(
        self,
        prompts: Sequence[EncodedPrompt],
        responses: Sequence[Sequence[int]],
        dtype: str,
        keys: Sequence[str],
    ) -> list[Sample]:
        """Run prompts with their responses teacher-forced; the samples, in the order of the prompts.

        TargetError when the engine ran other tokens, when its states do not give its own greedy token, and
        when a sequence does not fit into its KV cache.
        """
        transcripts = {
            key: Transcript.of(prompt, response)
            for key, prompt, response in zip(keys, prompts, responses, strict=True)
        }
        self._check_lengths(transcripts.values())
        for (key, transcript), prompt in zip(transcripts.items(), prompts, strict=True):
            self._submit(key, transcript, prompt, Draw(max_tokens=0))
        samples = dict[str, Sample]()

        def receive(captured: Captured) -> Tensor:
            samples[captured.key], last_1D = self._sample(
                captured, transcripts[captured.key], dtype
            )
            return last_1D

        self._run(len(keys), receive)
        return [samples[key] for key in keys]

    def respond(
        self,
        prompts: Sequence[EncodedPrompt],
        dtype: str,
        keys: Sequence[str],
        keep: Callable[[str, EncodedResponse, Sample], None],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Generate responses as `generate` does, and capture them in the same pass as `capture` does.

        `keep` is called with each as it is done, in any order. TargetError as from both, and when one sample
        is not what `target` captures: what was kept in this call is then not to be used.
        """
        by_key, checked = dict(zip(keys, prompts, strict=True)), keys[_telling(prompts)]
        self._check_lengths(map(Transcript.of, prompts), 2)
        for at, (key, prompt) in enumerate(by_key.items()):
            draw = Draw(
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed + at,
                stop_ids=self._target.info.eos_ids,
            )
            self._submit(key, Transcript.of(prompt), prompt, draw, grown=True)
        telling = list[Sample]()

        def receive(captured: Captured) -> Tensor:
            prompt = by_key[captured.key]
            response = self._target.response(captured.ids_L[prompt.length :].tolist())
            sample, last_1D = self._sample(
                captured, Transcript.of(prompt, response.ids), dtype
            )
            if captured.key == checked:
                telling.append(sample)
            keep(captured.key, response, sample)
            return last_1D

        chosen = self._run(len(keys), receive)[checked]
        self._check_logprobs(by_key[checked], chosen)
        self.check([by_key[checked]], [chosen.ids], telling, dtype)

    def _run(
        self, sequences: int, receive: Callable[[Captured], Tensor]
    ) -> dict[str, Chosen]:
        """Run what was submitted. `receive` gets each sequence and returns its last state, to be checked."""
        last, failed = dict[str, Tensor](), list[Exception]()
        self._engine.run()
        for captured in self._engine.states(sequences):
            try:
                last[captured.key] = receive(captured)
            except Exception as error:  # noqa: BLE001 - the others have to be received all the same
                failed.append(error)
        chosen = self._engine.chosen()
        if failed:
            raise failed[0]
        for key, last_1D in last.items():
            self._check_greedy(key, last_1D, chosen[key].greedy)
        return chosen

    def generate(
        self,
        prompts: Sequence[EncodedPrompt],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[EncodedResponse]:
        """Generate responses as `TargetModel.generate` does: greedy or sampled, other draws.

        TargetError when the log-probabilities of one response are not those that `target` gives.
        """
        checked = _telling(prompts)
        transcripts = [Transcript.of(prompt) for prompt in prompts]
        self._check_lengths(transcripts)
        for at, (prompt, transcript) in enumerate(
            zip(prompts, transcripts, strict=True)
        ):
            draw = Draw(
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed + at,
                stop_ids=self._target.info.eos_ids,
                logprobs=at == checked,
            )
            self._submit(str(at), transcript, prompt, draw)
        self._engine.run()
        chosen = self._engine.chosen()
        self._check_logprobs(prompts[checked], chosen[str(checked)])
        self._check_repeated(prompts, transcripts, chosen)
        return [
            self._target.response(chosen[str(at)].ids) for at in range(len(prompts))
        ]

    def check(
        self,
        prompts: Sequence[EncodedPrompt],
        responses: Sequence[Sequence[int]],
        samples: Sequence[Sample],
        dtype: str,
    ) -> None:
        """Compare one sample with the target's own capture; TargetError when they differ beyond rounding."""
        at = _telling(prompts)
        sample = samples[at]
        (own,) = self._target.capture(
            [prompts[at]], [responses[at]], self._features, dtype, [sample.key]
        )
        for feature in self._features:
            mine_ND, theirs_ND = (
                as_torch(s.features[feature], dtype).float() for s in (sample, own)
            )
            if not len(theirs_ND):
                continue
            difference_N = (mine_ND - theirs_ND).norm(dim=1) / theirs_ND.norm(
                dim=1
            ).clamp_min(1e-30)
            worst, allowed = float(difference_N.mean()), self._allowed(dtype)
            if not worst <= allowed:
                raise TargetError(
                    f"sample {sample.key}: {feature.name} differs from the capture with transformers by "
                    f"{worst:.2g} of a row's length (allowed {allowed:g}): {ADVICE}"
                )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _check_lengths(self, transcripts: Iterable[Transcript], drawn: int = 1) -> None:
        """PromptError if a sequence does not fit with the tokens that are drawn at least."""
        most = self._engine.max_length - drawn
        for at, transcript in enumerate(transcripts):
            if (length := len(transcript.ids_L)) > most:
                raise PromptError(
                    f"a sequence has {length} tokens, and vLLM takes {most} at most: use a larger GPU",
                    at,
                )

    def _submit(
        self,
        key: str,
        transcript: Transcript,
        prompt: EncodedPrompt,
        draw: Draw,
        grown: bool = False,
    ) -> None:
        """Hand over a sequence. `grown`: what is drawn after it is kept as well."""
        rows = self._positions(transcript) if self._features else {}
        visual = {
            name: value.to(self._target.dtype)
            if name.startswith("pixel_values")
            else value
            for name, value in prompt.inputs.items()
        }
        sequence = Submit(
            key=key,
            ids=transcript.ids_L.tolist(),
            media=media_of(prompt),
            rows={
                layer: at_N.numpy().astype(np.int32).tobytes()
                for layer, at_N in rows.items()
            },
            grown=tuple(self._grown) if grown else (),
            draw=draw,
        )
        self._engine.submit(sequence, {ROPE: transcript.rope_AL, **visual})

    def _positions(self, transcript: Transcript) -> dict[int, Tensor]:
        """The positions to keep of each layer, sorted: the union of what its features need."""
        parts = {
            self._layer_of["hidden"]: [transcript.positions("text")]
        }  # the last of them is checked
        for feature in self._features:
            parts.setdefault(self._layer_of[feature.source], []).append(
                transcript.positions(feature.where)
            )
        return {
            layer: torch.unique(torch.cat(places)) for layer, places in parts.items()
        }

    def _sample(
        self, captured: Captured, transcript: Transcript, dtype: str
    ) -> tuple[Sample, Tensor]:
        """The sample, and the last position's state after the final norm [1, D]."""
        if captured.ids_L.tolist() != transcript.ids_L.tolist():
            raise TargetError(
                f"sample {captured.key}: vLLM ran other tokens than were sent"
            )
        kept = self._positions(transcript)
        states = {
            source: captured.states[layer] for source, layer in self._layer_of.items()
        }
        if any(
            len(captured.states[layer]) != len(places) for layer, places in kept.items()
        ):
            raise TargetError(
                f"sample {captured.key}: vLLM sent other rows than were asked for"
            )
        states["hidden"] = self._target.norm(states["hidden"])
        rows = dict[Feature, Array]()
        for feature in self._features:
            at = torch.searchsorted(
                kept[self._layer_of[feature.source]],
                transcript.positions(feature.where),
            )
            rows[feature] = as_numpy(states[feature.source][at].to(DTYPES[dtype]))
        return transcript.sample(captured.key, rows), states["hidden"][-1:].clone()

    def _check_greedy(self, key: str, last_1D: Tensor, token: int) -> None:
        """The LM head turns the last state into the token that the engine chose, or one as likely."""
        logits_V = self._target.logits(last_1D)[0]
        short = float(logits_V.max() - logits_V[token])
        if not short <= ALLOWED[self._target.dtype_name] * float(logits_V.abs().max()):
            raise TargetError(
                f"sample {key}: vLLM continues with token {token}, and its captured state says "
                f"{int(logits_V.argmax())}: {ADVICE}"
            )

    def _check_repeated(
        self,
        prompts: Sequence[EncodedPrompt],
        transcripts: Sequence[Transcript],
        chosen: Mapping[str, Chosen],
    ) -> None:
        """The argmax of logits that are not finite is token 0, for ever: such responses are checked.

        PromptError for the first prompt whose states are not finite, TargetError as from `generate`.
        """
        repeated = [at for at in range(len(prompts)) if not any(chosen[str(at)].ids)]
        for at in repeated:
            draw = Draw(max_tokens=1, stop_ids=self._target.info.eos_ids, logprobs=True)
            self._submit(str(at), transcripts[at], prompts[at], draw)
        if repeated:
            self._engine.run()
            first = self._engine.chosen()
            for at in repeated:
                self._check_logprobs(prompts[at], first[str(at)])

    def _check_logprobs(self, prompt: EncodedPrompt, chosen: Chosen) -> None:
        """The target gives the chosen tokens the log-probabilities that the engine gives them."""
        (sample,) = self._target.capture(
            [prompt], [chosen.ids], [HIDDEN_TEXT], "float32"
        )
        hidden_ND = as_torch(sample.features[HIDDEN_TEXT], "float32").to(
            self._target.dtype
        )
        self._target.check_finite(hidden_ND[-1:])
        logits_RV = self._target.logits(hidden_ND[-len(chosen.ids) - 1 : -1])
        own_R = logits_RV.log_softmax(-1).gather(1, torch.tensor(chosen.ids)[:, None])[
            :, 0
        ]
        worst = float((own_R - torch.tensor(chosen.logprobs)).abs().mean())
        if not worst <= (allowed := LOGPROBS[self._target.dtype_name]):
            raise TargetError(
                f"vLLM gives its tokens log-probabilities that differ by {worst:.2g} from those of "
                f"transformers (allowed {allowed:g}): use --engine transformers for this target"
            )

    def _allowed(self, dtype: str) -> float:
        return max(ALLOWED[dtype], ALLOWED[self._target.dtype_name])


def loaded(model: str, how: Options, engine: EngineName) -> TargetModel:
    """The target as `load_for_capture` gives it; on the CPU where an engine has the devices."""
    if engine == "transformers":
        return load_for_capture(model, **how)
    dtype = how.get("dtype", "auto")
    if dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return load_for_capture(
        model, device="cpu", dtype=dtype, thinking=how.get("thinking", "")
    )


def _telling(prompts: Sequence[EncodedPrompt]) -> int:
    """Which prompt to check: the shortest that shows something, else the shortest."""
    return min(
        range(len(prompts)), key=lambda at: (not prompts[at].spans, prompts[at].length)
    )


def media_of(prompt: EncodedPrompt) -> tuple[Medium, ...]:
    """The images and videos of a prompt, in reading order. The runs of one video are one medium."""
    media = [
        Medium("image", span.start, span.length)
        for span in prompt.spans
        if _kind(prompt, span) == IMAGE
    ]
    runs = [span for span in prompt.spans if _kind(prompt, span) == VIDEO]
    frames = [int(grid[0]) for grid in prompt.inputs.get("video_grid_thw", ())]
    counts = frames if sum(frames) == len(runs) else [1] * len(runs)
    for count in counts:
        first, last, runs = runs[0], runs[count - 1], runs[count:]
        end = last.start + last.length
        mask = (
            (prompt.kind_L[first.start : end] == VIDEO).numpy().tobytes()
            if count > 1
            else b""
        )
        media.append(Medium("video", first.start, end - first.start, mask))
    return tuple(sorted(media, key=lambda medium: medium.start))


def _kind(prompt: EncodedPrompt, span: Span) -> int:
    return int(prompt.kind_L[span.start])
