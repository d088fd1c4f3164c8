#!/bin/bash
# The loop that operators write: a job again and again until one succeeds, without the nodes that
# somebody has written into a file. After launch_with_retries.sh and launch.sh in OLMo-core's
# src/scripts/lambda (Ai2), which also post to Slack.
#     loop.sh NODES FOLDER COMMAND…
nodes=$1 folder=$2
shift 2
submit() {
  local exclude
  exclude=$(paste -sd, "$folder/cordoned" 2>/dev/null)
  sbatch --parsable --nodes="$nodes" --ntasks-per-node=1 --output="$folder/%j.log" \
    ${exclude:+--exclude="$exclude"} <<JOB
#!/bin/bash
export MASTER_ADDR=\$(scontrol show hostnames "\$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
srun --kill-on-bad-exit=1 $*
JOB
}
while true; do
  if ! job=$(submit "$@"); then
    sleep 5
    continue
  fi
  echo "$(date +%s) $job" >> "$folder/jobs"
  while state=$(squeue --noheader --jobs="$job" --format=%T 2>&1); [ -n "$state" ]; do
    case $state in *"Invalid job id"*) break ;; esac
    sleep 5
  done
  [ "$(sacct --noheader --allocations --jobs="$job" --format=State%-9)" = "COMPLETED" ] && exit 0
  sleep 5
done
