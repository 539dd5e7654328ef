#!/bin/bash
# Ten minutes on one GPU, part by part: every part has its own limit and writes to $OUT at once, so that whatever happens
# numbers are left. The limits add up to nine minutes.
#
#   benchmarks/slot.sh fetch [NANOGPT-CLONE]    # where there is a network: packages and nanoGPT's model.py, into .slot/
#   OUT=/tmp/slot benchmarks/slot.sh            # where the GPU is; torch, numpy and .slot/ are all it needs
set -o pipefail
cd "$(dirname "$0")/.." || exit 1
if [ "$1" = fetch ]; then
  python3 -m pip download -q --only-binary=:all: --python-version "${PYTHON_THERE:-3.12}" -d .slot \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 \
    typer rich tomli-w tiktoken rustbpe filelock pydantic pytest pytest-timeout hypothesis || exit 1
  if [ -n "$2" ]; then cp "$2/model.py" .slot/; fi
  exit
fi

W=$(mktemp -d)
export W OUT=${OUT:-$W/out} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$W/site
mkdir -p "$OUT"
python3 -m pip install -q --no-index --no-deps --target "$W/site" .slot/*.whl || exit 1
nanogpt="python3 -m nanogpt_cli"
part() {
  echo "=== $1 $(date +%T)" | tee -a "$OUT/log"
  shift
  timeout "$@" 2>&1 | tee -a "$OUT/log"
}

python3 - <<'P'   # random GPT-2 ids, 20 MB
import os, pathlib
import numpy as np
folder = pathlib.Path(os.environ["W"], "d")
folder.mkdir()
for split, count in (("train", 10_000_000), ("val", 500_000)):
    np.random.default_rng(0).integers(0, 50257, count, dtype=np.uint16).tofile(folder / f"{split}.bin")
P
part ceilings 30 python3 - <<'P'
import torch
import torch.nn.functional as F
from triton.testing import do_bench
print(torch.__version__, torch.backends.cudnn.version(), torch.cuda.get_device_name())
for heads, width in ((12, 64), (6, 128)):  # SDPBackend: 1 flash, 2 efficient, 3 cudnn
    q = torch.randn(12, heads, 1024, width, device="cuda", dtype=torch.bfloat16)
    print("attention kernel", heads, width, [torch._fused_sdp_choice(q, q, q, None, p, True) for p in (0.0, 0.1)])
for m, n, k in ((8192, 8192, 8192), (12288, 2304, 768), (12288, 768, 3072), (12288, 50304, 768), (61440, 2304, 768)):
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    print(m, n, k, "%.0f TFLOP/s" % (2e-9 * m * n * k / do_bench(lambda: F.linear(a, b), return_mode="median")))
P
part cuda-tests 100 python3 -m pytest -q --no-header -p no:cacheprovider -k "cuda or never_waits" \
  tests/training/test_loop.py tests/training/test_optimizer.py tests/machine/test_sharding.py tests/model/test_generate.py
echo "expected: no warning, 12 rows in place of which more are taken, about 50% MFU on an H200 from step 4 on"
part real-run 120 $nanogpt train --preset gpt2 --data-dir "$W/d" --run "$W/gpt2" --max-iters 14 --lr-decay-iters 14 \
  --warmup-iters 1 --log-interval 1 --eval-iters 12 --compile --no-final-eval --no-sample
cp "$W/gpt2/logs/metrics.jsonl" "$OUT/gpt2.jsonl"
clone=()
if [ -f .slot/model.py ]; then clone=(--clone .slot); fi
part bench 180 python3 benchmarks/gpu.py "${clone[@]}" --seconds 4 --minutes 2.7 --json "$OUT/bench.json"
part profile 50 $nanogpt mfu gpt2 --batch-size 12 --profile "$OUT/p"
same="--preset shakespeare_char --data-dir $W/d --vocab-size 50304 --deterministic --no-compile --lr-decay-iters 12
  --warmup-iters 1 --eval-interval 100 --eval-iters 1 --batch-size 8 --no-final-eval --no-sample"
part bits 60 bash -c "$nanogpt train ${same//$'\n'/} --run $W/a --max-iters 12
  $nanogpt train ${same//$'\n'/} --run $W/b --max-iters 6; $nanogpt resume $W/b --max-iters 12"
python3 - <<'P' | tee -a "$OUT/log"
import os
import torch
a, b = (torch.load(f"{os.environ['W']}/{run}/ckpt.pt", weights_only=True)["model"] for run in "ab")
print("bit-identical on CUDA with --deterministic:", all(torch.equal(a[name], b[name]) for name in a), "- expected: True")
P
