# What is installed in the image of perturbdiff. Both recipes run it: perturbdiff.def (Apptainer) and Dockerfile. They
# put the files it needs into /opt/src, and set COMMIT, DIRTY, SOURCE and INDEX (another package index, or empty).
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
export PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off
export UV_NO_CACHE=1 UV_LINK_MODE=copy UV_HTTP_TIMEOUT=300 UV_NO_PROGRESS=1
# the settings of the host do not reach this place: its certificates are bound by bin/build-image, its index is
# an argument
ca=/etc/ssl/certs/ca-certificates.crt
[ ! -s $ca ] || export PIP_CERT=$ca SSL_CERT_FILE=$ca
[ -z "${INDEX:-}" ] || export PIP_INDEX_URL="$INDEX" UV_DEFAULT_INDEX="$INDEX"

# Nextflow's task metrics need ps, its wrapper bash
missing=""
command -v ps > /dev/null || missing="procps"
command -v bash > /dev/null || missing="$missing bash"
{ command -v python3 > /dev/null && python3 -c 'import ensurepip' 2> /dev/null; } || missing="$missing python3 python3-venv"
if [ -n "$missing" ]; then
    apt-get -o APT::Sandbox::User=root update -q
    apt-get -o APT::Sandbox::User=root install -y -q --no-install-recommends $missing ca-certificates
    apt-get clean
    rm -rf /var/lib/apt/lists/*
fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the base has Python %s; 3.11 or newer is needed" % sys.version.split()[0])'

# the tools stay outside the environment and go when they have done their work
python3 -m venv /opt/tools
python3 -m venv --without-pip /opt/venv
to=/opt/venv/bin/python
/opt/tools/bin/pip install -q --no-deps --require-hashes -r /opt/src/build.lock
if /opt/tools/bin/pip install -q --no-deps --require-hashes -r /opt/src/uv.lock; then
    install="/opt/tools/bin/uv pip install -q --python $to --compile-bytecode"
else
    echo 'install.sh: uv cannot be had, pip takes some minutes longer'
    install="/opt/tools/bin/pip --python $to install -q"
fi
export PYC_INVALIDATION_MODE=UNCHECKED_HASH   # nobody can change a file of the image, so no look at its time
$install --no-deps --require-hashes -r /opt/src/requirements.lock
find /opt/src -name __pycache__ -prune -exec rm -rf {} +
(cd /opt/src && /opt/tools/bin/python -m hatchling build -t wheel -d /opt/src/dist > /dev/null)
$install --no-deps /opt/src/dist/*.whl
# a registry's Python comes without bytecode, and who runs the image cannot write it
$to -m compileall -q "$($to -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" > /dev/null || true
# linking against CUDA takes a compiler, which is not here
find /opt/venv -name '*.a' -delete

# what the image is made of, for people (apptainer inspect) and for the run.json of every output
version=$($to -c 'import perturbdiff; print(perturbdiff.__version__)')
lock=$(sha256sum < /opt/src/requirements.lock | cut -c1-64)
code=$(cd /opt/src && find perturbdiff -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-64)
package=$($to -c 'import pathlib, perturbdiff; print(pathlib.Path(perturbdiff.__file__).parent)')
printf '{"commit": "%s", "dirty": "%s", "source_sha256": "%s", "lock_sha256": "%s"}\n' \
    "$COMMIT" "$DIRTY" "$code" "$lock" | sed 's/"unknown"/null/g; s/"true"/true/; s/"false"/false/' > "$package/_build.json"
# apptainer inspect prints these; Docker has no labels that a build finds out
cat >> "${APPTAINER_LABELS:-/dev/null}" <<END
org.opencontainers.image.version $version
org.opencontainers.image.revision $COMMIT
org.opencontainers.image.source $SOURCE
org.perturbdiff.dirty $DIRTY
org.perturbdiff.source.sha256 $code
org.perturbdiff.lock.sha256 $lock
END
mkdir -p /opt/perturbdiff
cp /opt/src/environment.sh /opt/src/try.sh /opt/perturbdiff/
rm -rf /opt/src /opt/tools
