#!/bin/bash
# Run by slurmd as root on every node when a job has ended: ends what of the job's lease still lives there
# and removes the lease's run folders and shared memory. A node is only failed (drained, by Slurm) if a
# process can't be killed: it may still hold GPU memory, and the next lease must not start beside it.

set -u
# shellcheck source-path=SCRIPTDIR source=leftovers.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/leftovers.sh" || exit 0

[[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_JOB_UID:-} ]] || exit 0
comment=${SLURM_JOB_COMMENT:-}
[[ -z $comment || $comment == forebay/* ]] || exit 0

lease=$(forebay_lease_of "$comment")
declare -A leases=()
[[ -n $lease ]] && leases[$lease]=1
victims=()
for pid in $(forebay_candidates); do
  forebay_read_env "$pid" || continue
  owner=${FOREBAY_ENV[SLURM_JOB_ID]:-}
  # A job that was submitted from inside the lease has inherited its name, but has an id of its own.
  if { [[ $owner == "$SLURM_JOB_ID" ]] ||
    [[ -z $owner && -n $lease && ${FOREBAY_ENV[FOREBAY_LEASE]} == "$lease" ]]; } &&
    forebay_same_site "$pid"; then # last: it takes a process, and other leases' wait for none here
    victims+=("$pid")
    [[ ${FOREBAY_ENV[FOREBAY_LEASE]} =~ ^[A-Za-z0-9._-]+$ ]] && leases[${FOREBAY_ENV[FOREBAY_LEASE]}]=1
  fi
done

status=0
if ((${#victims[@]})); then
  forebay_log "ending ${#victims[@]} left behind: ${victims[*]}"
  forebay_end "${victims[@]}" || {
    forebay_log "ERROR: a process of ${victims[*]} can't be killed; the node is given to Slurm to drain"
    status=1
  }
fi
for lease in "${!leases[@]}"; do
  forebay_remove_files "$lease"
done
exit "$status"
