"""Why no CPU test executes what only a GPU does, by function; see tests/cuda_branches.py."""

_KERNEL = "launches a CUDA kernel; tests/gpu/test_gpu_attention.py compares it with the reference"
_FLASH = "calls a package that exists on CUDA only; tests/gpu/test_gpu_attention.py where it is installed"
_SUITE = "measures on a GPU; `penstock bench step --suite gpu` runs it"
_ABSTRACT = "every kernel brings its own"
_CHECK = "asks a GPU; `make gpu-check` runs it, and tests/standin/test_commands.py where kernels do nothing"
_ALWAYS = "CudaKernel._forward CudaKernel._backward FlashKernel._launch FlashKernel._launch_backward"
_MEASURED = "setup.py:_fit suite_worker.py:run_steps suite_worker.py:_profiled suite_worker.py:_give_back"
_MEASURED += " storage.py:_readers storage.py:_jobs.store_read plain.py:plain_steps plain.py:compiled_steps"
_MEASURED += " suite_plain.py:plain_step"
_CHECKS = "machine pinned"

REASONS: dict[str, str] = {
    **{f"engine/attention/torch_cuda.py:{name}": _ABSTRACT for name in _ALWAYS.split()},
    "engine/attention/torch_cuda.py:capability": "asks the driver; tests of refusals give the answer",
    "engine/attention/torch_cuda.py:_rows": _KERNEL,
    **{f"engine/attention/flash_attn.py:FlashAttention{version}._launch": _FLASH for version in (2, 3, 4)},
    **{f"engine/attention/flash_attn.py:FlashAttention{version}._launch_backward": _FLASH for version in (2, 3, 4)},
    "engine/attention/flash_attn.py:_flash_arguments": _FLASH,
    "engine/attention/flash_attn.py:_flash2_arguments": _FLASH,
    "engine/attention/flash_attn.py:FlashAttention4._options": _FLASH,
    "engine/machine/device.py:why_no_cuda": "asks a torch that is built for CUDA why it finds no device",
    "engine/opening.py:_tell_plan": "tells of CUDA's kernels; tests/engine/test_kernels.py gives them",
    "engine/progress.py:memory_peaks": "the allocator's peak of a session on a GPU",
    "engine/runtime/calibrate.py:calibrate": "empties the allocator's cache",
    "engine/runtime/calibrate.py:_link_rates": "pins what is copied, and waits for the device before the lanes begin",
    "engine/session.py:Session.__init__": "pins the arena near the GPU; tests/gpu/test_pinned_arena.py",
    "engine/machine/affinity.py:place_threads": (
        "asks the driver for the GPU's place on the bus; `placement` is tested apart"
    ),
    "engine/runtime/lanes.py:_set_up_compilation": "starts Inductor's workers for Triton, which CPUs do without",
    "storage/arena.py:CudaRegistrar.register": "cudaHostRegister itself; other registrars stand for it in tests",
    "storage/arena.py:CudaRegistrar.unregister": "cudaHostUnregister itself; other registrars stand for it in tests",
    "storage/arena.py:_cudart": "the CUDA runtime, which torch for CPUs has not",
    "storage/readers.py:KvikioReader.__init__": "imports kvikio, which needs CUDA; tests/gpu/test_gpu_readers.py",
    "storage/readers.py:KvikioReader.read": "reads into CUDA memory; tests/gpu/test_gpu_readers.py",
    "storage/readers.py:KvikioReader.gpudirect": "asks the kvikio that was imported; tests/gpu/test_gpu_readers.py",
    "storage/readers.py:_import_kvikio": "imports kvikio, which needs CUDA; tests/gpu/test_gpu_readers.py",
    "storage/readers.py:KvikioReader.pinned_bytes": "asks the kvikio that was imported; tests/gpu/test_gpu_readers.py",
    "storage/readers.py:_probe": "waits for the GPU's memory; tests/gpu/test_gpu_readers.py",
    "engine/machine/device.py:configure": "takes the GPU's number, for the allocator's limit",
    "engine/runtime/executor.py:Executor.close": "waits for a GPU's stream that has failed",
    "engine/machine/presets.py:this_machine": "asks the driver for the GPU's name",
    "engine/machine/probe_compute.py:link_rates": "copies between pinned and GPU memory; tests/gpu/test_gpu_bench.py",
    **{f"app/gpu_check/device.py:{name}": _CHECK for name in _CHECKS.split()},
    "app/gpu_check/smoke.py:check": _CHECK,
    **{f"app/bench/{name}": _SUITE for name in _MEASURED.split()},
}
"""File:function -> why; one line each. A function that tests execute throughout has no place here."""
