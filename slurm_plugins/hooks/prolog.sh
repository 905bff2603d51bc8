#!/bin/bash
# Run by slurmd as root before a job starts on a node: where the job is a lease, ends what earlier leases of
# the same user left there although their jobs are gone (their epilog was cut short, or slurmd was down),
# so that the new lease finds its GPUs and ports free. Never fails the node: the agent looks for itself.

set -u
# shellcheck source-path=SCRIPTDIR source=leftovers.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/leftovers.sh" || exit 0

[[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_JOB_UID:-} ]] || exit 0
[[ -n $(forebay_lease_of "${SLURM_JOB_COMMENT:-}") ]] || exit 0

# Whether a job still runs on this machine: each of its steps has a slurmstepd, titled `[job.step]`.
# With -q a match counts although other processes end while grep reads.
job_lives() {
  grep -qsza "^slurmstepd: \[$1\." /proc/[0-9]*/cmdline
}

victims=()
declare -A dead=()
for pid in $(forebay_candidates); do
  forebay_ours "$pid" || continue
  owner=${FOREBAY_ENV[SLURM_JOB_ID]:-}
  # Without a job id it may be a lease that runs outside Slurm: not ours to judge.
  [[ $owner =~ ^[0-9]+$ && $owner != "$SLURM_JOB_ID" ]] || continue
  job_lives "$owner" && continue
  victims+=("$pid")
  [[ ${FOREBAY_ENV[FOREBAY_LEASE]} =~ ^[A-Za-z0-9._-]+$ ]] && dead[${FOREBAY_ENV[FOREBAY_LEASE]}]=1
done

if ((${#victims[@]})); then
  forebay_log "ending ${#victims[@]} left by jobs that are gone: ${victims[*]}"
  forebay_end "${victims[@]}" || forebay_log "ERROR: a process of ${victims[*]} can't be killed"
fi
for lease in "${!dead[@]}"; do
  forebay_remove_files "$lease"
done
exit 0
