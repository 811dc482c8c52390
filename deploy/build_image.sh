#!/bin/sh
# Build the image of one target (cpu or cuda), start it with nano, and ask it for a token.
# Usage: deploy/build_image.sh [cpu|cuda] [build arguments, such as --build-arg TORCH_INDEX=URL]
set -eu
cd "$(dirname "$0")/.."
target=${1:-cpu}
[ $# -gt 0 ] && shift
case $target in
cpu | cuda) ;;
*) echo "target is '$target', expected cpu or cuda" >&2; exit 2 ;;
esac
engine=
for name in docker podman; do
    if command -v "$name" > /dev/null 2>&1 && "$name" info > /dev/null 2>&1; then engine=$name && break; fi
done
if [ -z "$engine" ]; then
    echo "no container engine is running here: neither docker nor podman answers. Nothing was built." >&2
    exit 3
fi
"$engine" build -f deploy/Dockerfile --target "$target" -t "birkhoff:$target" "$@" .
gpus=
[ "$target" = cuda ] && gpus="--gpus all"
# shellcheck disable=SC2086
container=$("$engine" run --detach --rm $gpus --publish 127.0.0.1::8000 --env BIRKHOFF_API_KEY=trial "birkhoff:$target")
trap '"$engine" stop "$container" > /dev/null' EXIT
address=$("$engine" port "$container" 8000 | head -n 1)
for _ in $(seq 120); do
    curl -fs "http://$address/health" > /dev/null && break
    sleep 1
done
curl -fs "http://$address/v1/completions" -H 'authorization: Bearer trial' -H 'content-type: application/json' \
    -d '{"prompt": "Once upon a time", "max_tokens": 8}'
echo
echo "birkhoff:$target was built and answered."
