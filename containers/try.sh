# Tries the image of perturbdiff on a few simulated cells: apptainer test IMAGE.sif, or
# docker run --rm --entrypoint sh IMAGE /opt/perturbdiff/try.sh
set -eu
. /opt/perturbdiff/environment.sh
ps --version > /dev/null
bash --version > /dev/null
perturbdiff --version
python -c 'import torch; torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward(); print("torch", torch.__version__, "GPUs", torch.cuda.device_count())'
# counts and a store of a few simulated cells: seconds
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
perturbdiff -q simulate --config tiny --cells 800 --out "$there/raw" > /dev/null
perturbdiff -q preprocess "$there/raw/counts.h5ad" --config tiny --out "$there/store" > /dev/null
grep -q '"stage": "preprocess"' "$there/store/run.json" || { echo 'preprocess left no record'; exit 1; }
echo 'simulate, preprocess: well'
