# What a command in the image of perturbdiff finds in its environment, in both recipes.
export PATH=/opt/venv/bin:$PATH LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
# No home is mounted and nobody can write to the image: caches go to the node's temporary folder, to one of the
# user's own, since a node has several users; what another has put there under our name is not used.
PD_CACHE=${TMPDIR:-/tmp}/perturbdiff-$(id -u)
{ mkdir -p -m 700 "$PD_CACHE" && [ "$(stat -c %u "$PD_CACHE")" = "$(id -u)" ] && [ -w "$PD_CACHE" ]; } 2> /dev/null || PD_CACHE=$(mktemp -d)
export NUMBA_CACHE_DIR=$PD_CACHE/numba MPLCONFIGDIR=$PD_CACHE/matplotlib XDG_CACHE_HOME=$PD_CACHE TRITON_CACHE_DIR=$PD_CACHE/triton
