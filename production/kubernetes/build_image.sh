#!/usr/bin/env bash
# Builds the image of the Dockerfile beside it, and plans a mechanism in it.
# Usage: production/kubernetes/build_image.sh TAG
#
# Without a Docker daemon the same steps are taken in a fresh root, which shows that they work and is
# then removed: Debian by debootstrap in the place of the base image, and every COPY and RUN of the
# Dockerfile, in order. That needs root, debootstrap, and 4 GB in $TMPDIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly tag=${1:?a tag for the image, such as registry.example.com/bandmf:0.1.0}
readonly dockerfile=production/kubernetes/Dockerfile
readonly check="python -c 'import production.train_federated' && python -m tools.plan_mechanism \
  --num_rounds=8 --min_separation=4 --epsilon=8 --delta=1e-6 --output=/tmp/plan"

if docker info >/dev/null 2>&1; then
  docker build -f "$dockerfile" -t "$tag" .
  docker run --rm "$tag" /bin/bash -c "$check" >/dev/null
  echo "Built $tag; it plans, and has the training program."
  exit
fi

echo "There is no Docker daemon: taking the steps of $dockerfile in a fresh root." >&2
for tool in debootstrap chroot; do
  command -v "$tool" >/dev/null || { echo "$tool is missing (apt-get install debootstrap)." >&2; exit 1; }
done
root=$(mktemp -d)
readonly root
chmod 755 "$root"  # Not all steps are root's.
trap 'rm -rf "$root"' EXIT

# The base image has Python with venv, and what lets pip find its packages.
mirror=$(apt-get indextargets --format '$(SITE)' "Created-By: Packages" | head -n 1)
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm \
  "$root" "$mirror" >/dev/null
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
  [[ ! -e $file ]] || cat "$file" >"$root$file"
done

# A copy of what git has, as a build context without secrets or environments.
readonly context=$root/tmp/context
mkdir -p "$context"
git archive HEAD | tar -x -C "$context"

workdir=/ user=0
while read -r step arguments; do
  case $step in
    WORKDIR) workdir=$arguments && mkdir -p "$root$workdir" ;;
    USER) user=$arguments ;;
    ENV) environment=$arguments ;;
    COPY)
      read -ra names <<<"$arguments"
      target=$root$workdir/${names[-1]}
      for name in "${names[@]:0:${#names[@]}-1}"; do
        mkdir -p "$target"
        if [[ -d $context/$name ]]; then cp -r "$context/$name/." "$target"; else cp "$context/$name" "$target"; fi
      done ;;
    RUN) chroot "$root" /bin/bash -c "cd $workdir && $arguments" ;;
    FROM | \#* | "") ;;
    *) echo "$dockerfile has a step that this script does not know: $step." >&2 && exit 1 ;;
  esac
done <"$dockerfile"
chroot --userspec="$user" "$root" /usr/bin/env -i PATH=/usr/bin:/bin \
  /bin/bash -c "cd $workdir && export ${environment:-PATH=\$PATH} && $check" >/dev/null
echo "The steps of $dockerfile work in a fresh root; it plans, and has the training program."
