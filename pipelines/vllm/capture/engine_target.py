"""Capture with vLLM the samples that the target's own `capture` gives, and check them against it.

Shapes: N rows of a feature, L positions, R tokens of a response, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

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

ALLOWED = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""Relative difference of states or logits, by dtype."""
LOGPROBS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Mean difference of log-probabilities over a response, by dtype."""
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
        # vLLM gives this number to the output of the last layer.
        last = target.info.num_layers
        sources = {feature.source for feature in self._features}
        self._layer_of = dict[str, int]()
        for layer, tapped_sources in tapped(sources, last).items():
            self._layer_of |= dict.fromkeys(tapped_sources, layer)
        # The last state is checked, whatever is stored.
        self._layer_of["hidden"] = last
        # Layers that keep the positions of a response as it is generated.
        self._grown = {last}
        for feature in self._features:
            if feature.where == "text":
                self._grown.add(self._layer_of[feature.source])
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
        transcripts = dict[str, Transcript]()
        for key, prompt, response in zip(keys, prompts, responses, strict=True):
            transcripts[key] = Transcript.of(prompt, response)
        self._check_lengths(transcripts.values())
        for key, prompt in zip(keys, prompts, strict=True):
            self._submit(key, transcripts[key], prompt, Draw(max_tokens=0))
        samples = dict[str, Sample]()

        def receive(captured: Captured) -> Tensor:
            transcript = transcripts[captured.key]
            sample, last_1D = self._sample(captured, transcript, dtype)
            samples[captured.key] = sample
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
        by_key = dict(zip(keys, prompts, strict=True))
        checked_key = keys[_to_check(prompts)]
        self._check_lengths(map(Transcript.of, prompts), drawn=2)
        for number, (key, prompt) in enumerate(by_key.items()):
            draw = Draw(
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed + number,
                stop_ids=self._target.info.eos_ids,
            )
            self._submit(key, Transcript.of(prompt), prompt, draw, grown=True)
        checked_samples = list[Sample]()

        def receive(captured: Captured) -> Tensor:
            prompt = by_key[captured.key]
            response_ids = captured.ids_L[prompt.length :].tolist()
            response = self._target.response(response_ids)
            transcript = Transcript.of(prompt, response.ids)
            sample, last_1D = self._sample(captured, transcript, dtype)
            if captured.key == checked_key:
                checked_samples.append(sample)
            keep(captured.key, response, sample)
            return last_1D

        chosen = self._run(len(keys), receive)[checked_key]
        checked_prompt = by_key[checked_key]
        try:
            self._check_logprobs(checked_prompt, chosen)
            self.check([checked_prompt], [chosen.ids], checked_samples, dtype)
        except PromptError as error:
            # Callers run a batch again without the prompt of a PromptError: all would be kept twice.
            raise TargetError(str(error)) from None

    def _run(
        self, sequences: int, receive: Callable[[Captured], Tensor]
    ) -> dict[str, Chosen]:
        """Run what was submitted. `receive` gets each sequence and returns its last state, to be checked."""
        last_states = dict[str, Tensor]()
        errors = list[Exception]()
        self._engine.run()
        for captured in self._engine.states(sequences):
            try:
                last_states[captured.key] = receive(captured)
            except Exception as error:  # noqa: BLE001 - the others have to be received all the same
                errors.append(error)
        chosen = self._engine.chosen()
        if errors:
            raise errors[0]
        for key, last_1D in last_states.items():
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
        checked = _to_check(prompts)
        transcripts = [Transcript.of(prompt) for prompt in prompts]
        self._check_lengths(transcripts)
        for number, (prompt, transcript) in enumerate(
            zip(prompts, transcripts, strict=True)
        ):
            draw = Draw(
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed + number,
                stop_ids=self._target.info.eos_ids,
                logprobs=number == checked,
            )
            self._submit(str(number), transcript, prompt, draw)
        self._engine.run()
        by_key = self._engine.chosen()
        chosen = [by_key[str(number)] for number in range(len(prompts))]
        self._check_logprobs(prompts[checked], chosen[checked], checked)
        self._check_repeated(prompts, transcripts, chosen)
        return [self._target.response(tokens.ids) for tokens in chosen]

    def check(
        self,
        prompts: Sequence[EncodedPrompt],
        responses: Sequence[Sequence[int]],
        samples: Sequence[Sample],
        dtype: str,
    ) -> None:
        """Compare one sample with the target's own capture; TargetError when they differ beyond rounding.

        PromptError if the target itself cannot capture that sample.
        """
        number = _to_check(prompts)
        sample = samples[number]
        with _of_prompt(number):
            (expected,) = self._target.capture(
                [prompts[number]],
                [responses[number]],
                self._features,
                dtype,
                [sample.key],
            )
        allowed = max(ALLOWED[dtype], ALLOWED[self._target.dtype_name])
        for feature in self._features:
            state_ND = as_torch(sample.features[feature], dtype).float()
            expected_ND = as_torch(expected.features[feature], dtype).float()
            if not len(expected_ND):
                continue
            length_N = expected_ND.norm(dim=1).clamp_min(1e-30)
            difference_N = (state_ND - expected_ND).norm(dim=1) / length_N
            mean = float(difference_N.mean())
            if not mean <= allowed:
                raise TargetError(
                    f"sample {sample.key}: {feature.name} differs from the capture with transformers by "
                    f"{mean:.2g} of a row's length (allowed {allowed:g}): {ADVICE}"
                )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _check_lengths(self, transcripts: Iterable[Transcript], drawn: int = 1) -> None:
        """PromptError if a sequence does not fit with at least `drawn` tokens after it."""
        most = self._engine.max_length - drawn
        for number, transcript in enumerate(transcripts):
            length = len(transcript.ids_L)
            if length > most:
                raise PromptError(
                    f"a sequence has {length} tokens, and vLLM takes {most} at most: use a larger GPU",
                    number,
                )

    def _submit(
        self,
        key: str,
        transcript: Transcript,
        prompt: EncodedPrompt,
        draw: Draw,
        grown: bool = False,
    ) -> None:
        """Hand over a sequence. `grown`: the states of tokens drawn after it are kept as well."""
        rows = dict[int, bytes]()
        if self._features:
            for layer, position_N in self._positions(transcript).items():
                rows[layer] = position_N.numpy().astype(np.int32).tobytes()
        tensors = {ROPE: transcript.rope_AL}
        for name, value in prompt.inputs.items():
            is_pixels = name.startswith("pixel_values")
            tensors[name] = value.to(self._target.dtype) if is_pixels else value
        sequence = Submit(
            key=key,
            ids=transcript.ids_L.tolist(),
            media=media_of(prompt),
            rows=rows,
            grown=tuple(self._grown) if grown else (),
            draw=draw,
        )
        self._engine.submit(sequence, tensors)

    def _positions(self, transcript: Transcript) -> dict[int, Tensor]:
        """The positions to keep of each layer, sorted: the union of those that its features need."""
        last = self._layer_of["hidden"]
        by_layer = {last: [transcript.positions("text")]}  # the last one is checked
        for feature in self._features:
            layer = self._layer_of[feature.source]
            positions = transcript.positions(feature.where)
            by_layer.setdefault(layer, []).append(positions)
        return {
            layer: torch.unique(torch.cat(positions))
            for layer, positions in by_layer.items()
        }

    def _sample(
        self, captured: Captured, transcript: Transcript, dtype: str
    ) -> tuple[Sample, Tensor]:
        """The sample, and the last position's state after the final norm [1, D]."""
        if captured.ids_L.tolist() != transcript.ids_L.tolist():
            raise TargetError(
                f"sample {captured.key}: vLLM ran other tokens than were sent"
            )
        positions = self._positions(transcript)
        for layer, position_N in positions.items():
            if len(captured.states[layer]) != len(position_N):
                raise TargetError(
                    f"sample {captured.key}: vLLM sent other rows than were asked for"
                )
        states = {
            source: captured.states[layer] for source, layer in self._layer_of.items()
        }
        states["hidden"] = self._target.norm(states["hidden"])
        rows = dict[Feature, Array]()
        for feature in self._features:
            row_N = torch.searchsorted(
                positions[self._layer_of[feature.source]],
                transcript.positions(feature.where),
            )
            state_ND = states[feature.source][row_N].to(DTYPES[dtype])
            rows[feature] = as_numpy(state_ND)
        return transcript.sample(captured.key, rows), states["hidden"][-1:].clone()

    def _check_greedy(self, key: str, last_1D: Tensor, token: int) -> None:
        """The LM head turns the last state into the token that the engine chose, or one as likely."""
        logits_V = self._target.logits(last_1D)[0]
        difference = float(logits_V.max() - logits_V[token])
        relative = ALLOWED[self._target.dtype_name]
        if not difference <= relative * float(logits_V.abs().max()):
            raise TargetError(
                f"sample {key}: vLLM continues with token {token}, and its captured state says "
                f"{int(logits_V.argmax())}: {ADVICE}"
            )

    def _check_repeated(
        self,
        prompts: Sequence[EncodedPrompt],
        transcripts: Sequence[Transcript],
        chosen: Sequence[Chosen],
    ) -> None:
        """The argmax of logits that are not finite is token 0, for ever: such responses are checked.

        PromptError for the first prompt whose states are not finite, TargetError as from `generate`.
        """
        repeated = [
            number for number, tokens in enumerate(chosen) if not any(tokens.ids)
        ]
        if not repeated:
            return
        for number in repeated:
            draw = Draw(max_tokens=1, stop_ids=self._target.info.eos_ids, logprobs=True)
            self._submit(str(number), transcripts[number], prompts[number], draw)
        self._engine.run()
        drawn_again = self._engine.chosen()
        for number in repeated:
            again = drawn_again[str(number)]
            self._check_logprobs(prompts[number], again, number)

    def _check_logprobs(
        self, prompt: EncodedPrompt, chosen: Chosen, number: int = 0
    ) -> None:
        """The target gives the chosen tokens the log-probabilities that the engine gives them.

        PromptError, with the `number` of the prompt, if its states are not finite.
        """
        with _of_prompt(number):
            (sample,) = self._target.capture(
                [prompt], [chosen.ids], [HIDDEN_TEXT], "float32"
            )
            hidden_ND = as_torch(sample.features[HIDDEN_TEXT], "float32")
            hidden_ND = hidden_ND.to(self._target.dtype)
            self._target.check_finite(hidden_ND[-1:])
        predicting_RD = hidden_ND[-len(chosen.ids) - 1 : -1]
        logprob_RV = self._target.logits(predicting_RD).log_softmax(-1)
        ids_R = torch.tensor(chosen.ids)
        expected_R = logprob_RV.gather(1, ids_R[:, None])[:, 0]
        mean = float((expected_R - torch.tensor(chosen.logprobs)).abs().mean())
        allowed = LOGPROBS[self._target.dtype_name]
        if not mean <= allowed:
            raise TargetError(
                f"vLLM gives its tokens log-probabilities that differ by {mean:.2g} from those of "
                f"transformers (allowed {allowed:g}): use --engine transformers for this target"
            )


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


@contextmanager
def _of_prompt(number: int) -> Iterator[None]:
    """Give a PromptError about a prompt that is run alone the number of that prompt."""
    try:
        yield
    except PromptError as error:
        error.at = number
        raise


def _to_check(prompts: Sequence[EncodedPrompt]) -> int:
    """The number of the prompt to check: the shortest with an image or video, else the shortest."""

    def rank(number: int) -> tuple[bool, int]:
        return not prompts[number].spans, prompts[number].length

    return min(range(len(prompts)), key=rank)


def media_of(prompt: EncodedPrompt) -> tuple[Medium, ...]:
    """The images and videos of a prompt, in reading order. The runs of one video are one medium."""
    media = [
        Medium("image", span.start, span.length)
        for span in prompt.spans
        if _kind(prompt, span) == IMAGE
    ]
    runs = [span for span in prompt.spans if _kind(prompt, span) == VIDEO]
    # Where a video's frames are apart, it has as many runs; else one.
    frames = [int(grid[0]) for grid in prompt.inputs.get("video_grid_thw", ())]
    counts = frames if sum(frames) == len(runs) else [1] * len(runs)
    for count in counts:
        first = runs[0]
        last = runs[count - 1]
        runs = runs[count:]
        end = last.start + last.length
        mask = b""
        if count > 1:
            is_visual_L = prompt.kind_L[first.start : end] == VIDEO
            mask = is_visual_L.numpy().tobytes()
        media.append(Medium("video", first.start, end - first.start, mask))
    return tuple(sorted(media, key=lambda medium: medium.start))


def _kind(prompt: EncodedPrompt, span: Span) -> int:
    return int(prompt.kind_L[span.start])
