#!/usr/bin/env bash
# Build the stand-in for the torch of PYTHON into OUT, and OUT/run, which starts a command on it:
#   build.sh PYTHON OUT     then     OUT/run PYTHON -m penstock.app.cli.main train RECIPE --set train.device=cuda
#   build.sh --headers     says in one line what is missing, if anything is
# Needs g++ and the headers of CUDA 13: those in CUDA_INCLUDE, or in CUDA_HOME (/usr/local/cuda).
set -euo pipefail
include=${CUDA_INCLUDE:-${CUDA_HOME:-/usr/local/cuda}/include}
for file in cuda.h cuda_runtime_api.h; do
    if [ ! -e "$include/$file" ]; then
        echo "standin: skipped: $include/$file is missing; install the CUDA 13 toolkit's headers, or set CUDA_INCLUDE"
        exit 1
    fi
done
if ! command -v g++ >/dev/null; then
    echo "standin: skipped: there is no g++"
    exit 1
fi
if [ "$1" = --headers ]; then exit 0; fi
python=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$python" "$here/generate.py" "$site" "$include/cuda.h" "$out"
compile=(g++ -O2 -g -shared -fPIC -std=c++17 -Wall -Wextra -I"$include")
# Built beside and renamed: a running process keeps the library that it has.
library() { # NAME SOURCES AND FLAGS...
    local name=$1
    shift
    echo "$name { global: *; };" >"$out/$name.map"
    "${compile[@]}" "$@" -Wl,-soname,"$name" -Wl,--version-script="$out/$name.map" -o "$out/$name.new"
    mv "$out/$name.new" "$out/$name"
}
src=$here/src
library libcudart.so.13 "$src"/{counters,settings,memory,streams,races,device,runtime}.cpp "$out/runtime_stubs.cpp" -ldl -lpthread
link=(-L"$out" -l:libcudart.so.13)
"${compile[@]}" "$src"/driver{,_copies}.cpp "$out/driver_stubs.cpp" -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1.new" "${link[@]}" -ldl
mv "$out/libcuda.so.1.new" "$out/libcuda.so.1"
library libcublas.so.13 "$out/cublas_stubs.cpp" "${link[@]}"
library libcublasLt.so.13 "$out/cublasLt_stubs.cpp" "${link[@]}"
# Kernels that compute, for a process that is started by $out/compute.
computes=$here/computes
torch=$site/torch
flags=(-O1 -g0 -std=c++17 -fPIC -Wall -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -isystem "$include")
objects=()
for source in "$computes"/*.cpp; do
    object=$out/$(basename "$source" .cpp).o
    objects+=("$object")
    if [ "$object" -nt "$source" ] && [ "$object" -nt "$computes/computes.h" ]; then continue; fi
    g++ "${flags[@]}" -c "$source" -o "$object" # minutes in all
done
g++ -shared "${objects[@]}" -o "$out/libcomputes.so.new" -L"$torch/lib" -ltorch_cpu -lc10 -lc10_cuda -ltorch_cuda -ltorch \
    "${link[@]}" -ldl
mv "$out/libcomputes.so.new" "$out/libcomputes.so"
# torch loads what is named under "torch.backends" when it is imported: in every process, also in those that one starts.
mkdir -p "$out/python/computes-0.dist-info"
printf 'Metadata-Version: 2.1\nName: computes\nVersion: 0\n' >"$out/python/computes-0.dist-info/METADATA"
printf '[torch.backends]\ncomputes = computes.load:load\n' >"$out/python/computes-0.dist-info/entry_points.txt"
cat >"$out/run" <<RUN
#!/usr/bin/env bash
export LD_LIBRARY_PATH=$out:\${LD_LIBRARY_PATH:-}
export LD_PRELOAD=$out/libcudart.so.13:$out/libcublasLt.so.13:$out/libcublas.so.13
exec "\$@"
RUN
cat >"$out/compute" <<RUN
#!/usr/bin/env bash
export PYTHONPATH=$out/python:$here\${PYTHONPATH:+:\$PYTHONPATH} COMPUTES_LIBRARY=$out/libcomputes.so OMP_NUM_THREADS=\${OMP_NUM_THREADS:-1}
exec $out/run "\$@"
RUN
chmod +x "$out/run" "$out/compute"
echo "standin: built for $("$python" -c 'import torch; print("torch", torch.__version__)')"
