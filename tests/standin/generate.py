"""Write the stubs of libcuda, libcudart, libcublas and libcublasLt: generate.py SITE_PACKAGES CUDA_H OUT.

What is written by hand in src/ is left out; the rest of libcuda and libcudart answers "not supported", and every call
of cuBLAS succeeds and does nothing, unless kernels compute.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
API = '#define API extern "C" __attribute__((visibility("default")))\n'
NOT_SUPPORTED = 801

CUBLAS = """
API int cublasCreate_v2(void** handle) { *handle = &something; return 0; }
API int cublasGetVersion_v2(void*, int* version) { *version = 130000; return 0; }
API const char* cublasGetStatusString(int) { return "an error of the stand-in"; }
API int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
API int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
API size_t cublasGetCudartVersion() { return 13000; }
"""
CUBLAS_LT = """
API int cublasLtCreate(void** handle) { *handle = &something; return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
    *found = 1;
    return 0;
}
API size_t cublasLtGetVersion() { return 130000; }
"""


def by_hand(*names: str) -> set[str]:
    """Functions that the given sources define."""
    text = "\n".join((SOURCES / name).read_text() for name in names)
    return set(re.findall(r"^API [\w *]+?[ *](\w+)\(", text, flags=re.MULTILINE))


def wanted(site: Path, pattern: str) -> set[str]:
    """Functions that the libraries of torch want from elsewhere."""
    found: set[str] = set()
    for library in [*site.glob("torch/lib/*.so"), *site.glob("nvidia/*/lib/*.so*"), *site.glob("*kvikio*/**/*.so")]:
        command = ["nm", "-D", "--undefined-only", str(library)]
        text = subprocess.run(command, capture_output=True, text=True).stdout
        found |= set(re.findall(rf"U ({pattern}\w+)", text))
    return found


def main(site: Path, cuda_h: Path, out: Path) -> None:
    """Write OUT/{driver,runtime,cublas,cublasLt}_stubs.cpp."""
    header = cuda_h.read_text()
    declared = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", header))
    declared |= set(re.findall(r"#\s*define\s+cu\w+\s+(cu\w+_v\d)\s", header))  # what a function is called today
    log = 'if (getenv("STANDIN_LOG")) fprintf(stderr, "[standin] there is no %s\\n", __func__);'
    stubs = [
        f"API int {name}() {{ {log} return {NOT_SUPPORTED}; }}"
        for name in sorted(declared - by_hand("driver.cpp", "driver_copies.cpp"))
    ]
    _write(out / "driver_stubs.cpp", "#include <cstdio>\n#include <cstdlib>\n" + API, stubs)

    names = wanted(site, "(?:__)?cuda[A-Z_]") - by_hand("runtime.cpp", "device.cpp")
    stubs = [f"API int {name}() {{ {log} return {NOT_SUPPORTED}; }}" for name in sorted(names)]
    _write(out / "runtime_stubs.cpp", "#include <cstdio>\n#include <cstdlib>\n" + API, stubs)

    names = wanted(site, "cublas")
    for library, text in (("cublas", CUBLAS), ("cublasLt", CUBLAS_LT)):
        own = {name for name in names if name.startswith("cublasLt") == (library == "cublasLt")}
        stubs = []
        for name in sorted(own - set(re.findall(r"(cublas\w+)\(", text))):
            counts = re.search(r"[Gg]emm|Matmul$|[Tt]rsm|[Gg]emv|Dot|[Ss]yrk", name) is not None
            stubs.append(f"API int {name}() {{ return {'standin_product()' if counts else '0'}; }}")
        head = '#include <cstddef>\nextern "C" int standin_product();\n' + API + "static int something;\n"
        _write(out / f"{library}_stubs.cpp", head + text, stubs)


def _write(path: Path, head: str, stubs: list[str]) -> None:
    path.write_text(head + "\n".join(stubs) + "\n")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
