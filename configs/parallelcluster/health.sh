#!/bin/bash
# Slurm's HealthCheckProgram on trn1 nodes: drains a node that lacks a part of its hardware.
#
#   health.sh install    root, at a node's first start: puts itself where slurm.conf names it
#   health.sh            root, by slurmd, every HealthCheckInterval seconds while the node idles
#   health.sh show       prints the faults and drains nothing; exit code 1 if there are any
#
# It only looks at /dev, /sys and the mounts: it takes a few milliseconds and no Neuron device.
set -euo pipefail

ROOT=${SLURMLLM_HEALTH_ROOT:-} # for tests: a folder in place of /
CHIPS=16
SCRATCH=/scratch

count() {
  local found=0 entry
  for entry in "$@"; do
    if [ -e "$entry" ]; then found=$((found + 1)); fi
  done
  echo "$found"
}

links_expected() {
  case "$(cat "$ROOT/sys/devices/virtual/dmi/id/product_name" 2>/dev/null || true)" in
    trn1n.32xlarge) echo 16 ;;
    *) echo 8 ;;
  esac
}

faults() {
  local found wanted chip errors
  found=$(count "$ROOT"/dev/neuron[0-9]*)
  if [ "$found" -ne "$CHIPS" ]; then echo "$found of $CHIPS Neuron chips"; fi
  found=$(count "$ROOT"/sys/class/infiniband/*)
  wanted=$(links_expected)
  if [ "$found" -lt "$wanted" ]; then echo "$found of $wanted EFA links"; fi
  if ! grep --quiet " $SCRATCH " "$ROOT/proc/mounts"; then
    echo "$SCRATCH is not mounted"
  elif grep --quiet " $SCRATCH [^ ]* \(ro\|[^ ]*,ro\)[, ]" "$ROOT/proc/mounts"; then
    echo "$SCRATCH is read-only"
  fi
  for chip in "$ROOT"/sys/devices/virtual/neuron_device/neuron[0-9]*; do
    for errors in mem_ecc_uncorrected sram_ecc_uncorrected; do
      found=$(cat "$chip/stats/hardware/$errors" 2>/dev/null || echo 0)
      if [ "$found" != 0 ]; then echo "${chip##*/}: $errors $found"; fi
    done
  done
}

case "${1:-}" in
  install)
    install -D -m 755 "$0" /opt/slurmllm/health.sh
    ;;
  show)
    found=$(faults)
    if [ -n "$found" ]; then
      echo "$found"
      exit 1
    fi
    ;;
  "")
    found=$(faults)
    if [ -n "$found" ]; then
      PATH=$PATH:/opt/slurm/bin
      scontrol update "NodeName=${SLURMD_NODENAME:-$(hostname --short)}" State=DRAIN \
        "Reason=slurmllm health: ${found//$'\n'/; }"
    fi
    ;;
  *)
    echo "usage: health.sh [install | show]" >&2
    exit 2
    ;;
esac
