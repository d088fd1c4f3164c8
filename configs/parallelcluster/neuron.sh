#!/bin/bash
# What a trn1 cluster needs on top of ParallelCluster's own image (Ubuntu 24.04), in pinned versions.
#
#   neuron.sh node          root, at a compute node's first start: driver, runtime, EFA, port
#   neuron.sh head          root, at the head node's first start: Python and a C++ compiler
#   neuron.sh python DIR    anybody, once, on the head node: the Python environment in DIR
#
# AWS tells users of neuronx-distributed's training to stay on Neuron 2.28 with PyTorch 2.9; what
# later releases ended: docs/parallelcluster.md, "The Neuron environment". The versions are those
# of AWS's release manifest for 2.28.1.
set -euo pipefail

DRIVER=2.26.10.0
COLLECTIVES=2.30.59.0
RUNTIME=2.30.51.0
TOOLS=2.28.23.0
EFA=1.47.0 # and later: ParallelCluster 3.16 brings its own
PYTHON_PACKAGES=(
  torch==2.9.0
  torch-xla==2.9.0
  torch-neuronx==2.9.0.2.12.22436
  neuronx-cc==2.23.6484.0
  libneuronxla==2.2.15515.0
  neuronx-distributed==0.17.26814
)
# The public index holds empty packages of these names; the exact versions exist at AWS alone.
NEURON_INDEX=https://pip.repos.neuron.amazonaws.com
NEURON_APT=https://apt.repos.neuron.amazonaws.com
# master_port of the cluster profile, the control plane's after it, and where torch-xla has the
# Neuron runtime meet.
RESERVED_PORTS=41000-41001,62182

apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    --option DPkg::Lock::Timeout=300 "$@"
}

add_neuron_repository() {
  local key=/etc/apt/keyrings/neuron.asc codename
  # shellcheck source=/dev/null
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  install -d -m 755 /etc/apt/keyrings
  curl --fail --silent --show-error --location --retry 5 --output "$key" \
    "$NEURON_APT/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB"
  echo "deb [signed-by=$key] $NEURON_APT $codename main" >/etc/apt/sources.list.d/neuron.list
  apt-get update --option DPkg::Lock::Timeout=300
}

install_neuron() {
  # The driver is built for the running kernel.
  apt_install "linux-headers-$(uname -r)" dkms
  # The runtime's and the collectives' package versions end in a digest.
  apt_install --allow-downgrades --allow-change-held-packages "aws-neuronx-dkms=$DRIVER" \
    "aws-neuronx-collectives=$COLLECTIVES*" "aws-neuronx-runtime-lib=$RUNTIME*" \
    "aws-neuronx-tools=$TOOLS"
  # An unattended upgrade would change the versions under a run, and with them every graph.
  apt-mark hold aws-neuronx-dkms aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools
  modprobe neuron
  # shellcheck disable=SC2016 # the variable is the reader's
  echo 'export PATH="$PATH:/opt/aws/neuron/bin"' >/etc/profile.d/neuron.sh
}

installed_efa() {
  sed -n 's/.*installer version: *//p' /opt/amazon/efa_installed_packages 2>/dev/null || true
}

install_efa() {
  local found oldest folder archive=aws-efa-installer-$EFA.tar.gz
  found=$(installed_efa)
  oldest=$(printf '%s\n%s\n' "$EFA" "${found:-0}" | sort --version-sort | head -n 1)
  if [ "$oldest" = "$EFA" ]; then
    echo "EFA $found is there"
    return
  fi
  folder=$(mktemp --directory)
  (
    cd "$folder"
    for file in "$archive" "$archive.sig" aws-efa-installer.key; do
      curl --fail --silent --show-error --retry 5 --remote-name \
        "https://efa-installer.amazonaws.com/$file"
    done
    export GNUPGHOME=$folder
    gpg --batch --quiet --import aws-efa-installer.key
    gpg --batch --verify "$archive.sig" "$archive"
    tar --extract --file "$archive"
    cd aws-efa-installer
    ./efa_installer.sh --yes --minimal
  )
  rm -rf "$folder"
}

prepare_network() {
  # A client's socket must not take the rendezvous ports before the workers do; hundreds of workers
  # connect to them at once (HLAT's launch scripts set the same).
  cat >/etc/sysctl.d/90-slurmllm.conf <<EOF
net.ipv4.ip_local_reserved_ports = $RESERVED_PORTS
net.core.somaxconn = 65535
EOF
  sysctl --quiet --load /etc/sysctl.d/90-slurmllm.conf
  # trn1 has eight interfaces, and the line that names this host may hold the address of a wrong
  # one (a known issue of AWS's samples); without it, the cluster's own DNS answers.
  local name
  name=$(hostname --short)
  sed --in-place "/[[:space:]]$name\([[:space:]]\|\$\)/d" /etc/hosts
}

tune_lustre() {
  # A save must not fill the host's memory faster than it is written (neuronx-nemo-megatron's
  # job scripts set the same).
  lctl set_param 'osc.*.max_dirty_mb=64' || echo "no Lustre mounted"
}

node() {
  add_neuron_repository
  install_neuron
  install_efa
  prepare_network
  tune_lustre
  # torch.compile of the native backend, should a job use it here.
  apt_install g++ python3-venv
}

head_node() {
  apt-get update --option DPkg::Lock::Timeout=300
  apt_install g++ git make python3-venv python3-dev
}

python_environment() {
  local folder=$1
  if [ -e "$folder" ]; then
    echo "neuron.sh: $folder exists; remove it or name another folder" >&2
    exit 2
  fi
  python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
    echo "neuron.sh: $(python3 --version): slurmllm needs 3.11 or later, and the wheels of" \
      "Neuron 2.28 end at 3.12; use Ubuntu 24.04's own python3" >&2
    exit 2
  }
  python3 -m venv "$folder"
  # Whatever is installed later must not pull these away: pip install --constraint this file.
  printf '%s\n' "${PYTHON_PACKAGES[@]}" >"$folder/neuron-constraints.txt"
  "$folder/bin/python" -m pip install --quiet --upgrade pip
  "$folder/bin/python" -m pip install --extra-index-url "$NEURON_INDEX" "${PYTHON_PACKAGES[@]}"
}

case "${1:-}" in
  node) node ;;
  head) head_node ;;
  python) python_environment "${2:?neuron.sh python: name the folder of the environment}" ;;
  *)
    echo "usage: neuron.sh node | head | python DIR" >&2
    exit 2
    ;;
esac
