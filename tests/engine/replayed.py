"""A CPU's stand-in for CUDA graphs: what a graph keeps of its capture is kept, what its kernels would read then is read at each step.

vLLM's model runner pads single-token steps to a captured size as it does on a GPU. The model then runs, with its Python, on the
arguments and the attention metadata of the step that was captured, not of its own: whatever of a step does not lie in the memory that
the captured one read is not seen, as it is not by a graph's kernels. What isoexec is told of captures and replays, it is told.
"""

from __future__ import annotations

import contextlib

SIZES = (1, 2, 5, 8, 16)


class Replayed:
    """Takes the place of vLLM's graph wrapper around a model."""

    def __init__(self, model):
        self._model, self._captured = model, {}

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, **arguments):
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        from isoexec.runtimes.vllm import graphs

        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return self._model(**arguments)
        size = context.batch_descriptor.num_tokens
        if size not in self._captured:
            output, done = graphs.capture(lambda: self._model(**arguments), size)
            self._captured[size] = arguments, context.attn_metadata, done
            return output
        arguments, context.attn_metadata, done = self._captured[size]
        output = self._launch(arguments, done)
        graphs.replayed(done)
        return output

    def _launch(self, arguments, done):
        """The model's output; what captured kernels record lies in the sheets of the capture."""
        from isoexec.ops._core import registry
        from isoexec.ops._trace.recorder import Recorder
        from isoexec.runtimes.vllm import graphs

        if done.observer is None:
            return self._model(**arguments)
        again = Recorder(done.observer.level)
        with registry.observing(again):
            output, fresh = graphs.capture(lambda: self._model(**arguments), done.rows)
        for (_, sheets), (_, written) in zip(done.recorded.parts, fresh.recorded.parts, strict=True):
            for sheet, values in zip(sheets, written, strict=True):
                sheet.copy_(values)
        return output


@contextlib.contextmanager
def replaying(runner, monkeypatch):
    """Steps of single tokens inside the block are replays of dummy steps that vLLM runs before, as it does to capture graphs."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    def dispatch(num_tokens, uniform_decode=False, valid_modes=None, **_):
        sizes = [size for size in SIZES if size >= num_tokens]
        if not uniform_decode or not sizes or valid_modes == {CUDAGraphMode.NONE}:
            return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)
        return CUDAGraphMode.FULL, BatchDescriptor(sizes[0], num_reqs=sizes[0], uniform=True)

    with monkeypatch.context() as patch:
        patch.setattr(runner.cudagraph_dispatcher, "dispatch", dispatch)
        model = runner.get_model()
        patch.setattr(runner, "get_model", lambda: model)  # as on a GPU, where it is asked for without its wrapper
        patch.setattr(runner, "model", Replayed(model))
        for size in reversed(SIZES):
            for mode, capturing in ((CUDAGraphMode.NONE, False), (CUDAGraphMode.FULL, True)):  # warmed up, then captured
                runner._dummy_run(
                    size, cudagraph_runtime_mode=mode, uniform_decode=True, force_attention=True, is_graph_capturing=capturing
                )
        yield
