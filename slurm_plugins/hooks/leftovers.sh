# shellcheck shell=bash
# What a dead replica may leave on a node, and how to find out whose it is. Sourced by prolog.sh and
# epilog.sh, which slurmd runs as root: so nothing is ended or removed that can't be told from another
# job's. A process is a lease's if its environment says so (FOREBAY_LEASE), it runs as the job's user, and
# neither its job id nor its cluster says otherwise; a folder or segment is one's if name and owner are.

forebay_dir=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
forebay_tmp=${FOREBAY_HOOKS_TMP:-/tmp}
forebay_shm=${FOREBAY_HOOKS_SHM:-/dev/shm}

# Write one line to the log that forebay_hooks.conf names, else to the system's.
forebay_log() {
  local line file=""
  line="$(date '+%Y-%m-%dT%H:%M:%S') ${0##*/} node=${SLURMD_NODENAME:-?} job=${SLURM_JOB_ID:-?}: $*"
  file=$(sed -n 's/^ *hook_log *= *//p' "$forebay_dir/forebay_hooks.conf" 2>/dev/null)
  if [[ -n $file ]]; then
    printf '%s\n' "$line" >>"$file"
  else
    logger -t forebay -- "$line" 2>/dev/null || printf '%s\n' "$line" >&2
  fi
  return 0
}

# Print the lease of a job comment, nothing if it holds no stamp.
forebay_lease_of() {
  local pattern='^forebay/1 .*lease=([A-Za-z0-9._-]+)( |$)'
  [[ $1 =~ $pattern ]] && printf '%s\n' "${BASH_REMATCH[1]}"
}

# Read a process's environment into the array FOREBAY_ENV; false if it is gone.
forebay_read_env() {
  local item
  FOREBAY_ENV=()
  [[ -r /proc/$1/environ ]] || return 1
  while IFS= read -r -d '' item; do
    case $item in
      FOREBAY_LEASE=* | SLURM_JOB_ID=* | SLURM_CLUSTER_NAME=* | SLURM_CONF=*)
        FOREBAY_ENV[${item%%=*}]=${item#*=} ;;
    esac
  done 2>/dev/null <"/proc/$1/environ"
  [[ -n ${FOREBAY_ENV[FOREBAY_LEASE]:-} ]]
}
declare -A FOREBAY_ENV

# Print the pids of live processes on this machine that carry any lease; one quick pass over /proc.
forebay_candidates() {
  local path
  grep -lsz '^FOREBAY_LEASE=' /proc/[0-9]*/environ 2>/dev/null | while IFS= read -r path; do
    path=${path#/proc/}
    printf '%s\n' "${path%/environ}"
  done
}

# Whether the process read last is of this job's user and, if it is in a job, of this very cluster: job ids
# count up from 1 in every cluster, and several (or a stand-in for Slurm) may share a machine.
forebay_same_site() {
  local pid=$1 owner
  owner=$(stat -c %u "/proc/$pid" 2>/dev/null) || return 1
  [[ $owner == "$SLURM_JOB_UID" ]] || return 1
  [[ -n ${FOREBAY_ENV[SLURM_JOB_ID]:-} ]] || return 0
  [[ ${FOREBAY_ENV[SLURM_CLUSTER_NAME]:-} == "${SLURM_CLUSTER_NAME:-?}" &&
    ${FOREBAY_ENV[SLURM_CONF]:-} == "${SLURM_CONF:-?}" ]]
}

# Read a process into FOREBAY_ENV; whether it is a lease's, of this job's user and cluster.
forebay_ours() {
  forebay_read_env "$1" && forebay_same_site "$1"
}

# Print the /dev/shm files that the given processes have mapped.
forebay_segments() {
  local pid
  for pid in "$@"; do
    awk -v shm="$forebay_shm/" 'index($6, shm) == 1 { print $6 }' "/proc/$pid/maps" 2>/dev/null
  done | sort -u
}

# SIGKILL the given processes and remove the segments that only they had; false if one survives.
forebay_end() {
  local pid path tries
  local -a segments=()
  (($#)) || return 0
  mapfile -t segments < <(forebay_segments "$@")
  kill -KILL "$@" 2>/dev/null
  for ((tries = 0; tries < 50; tries++)); do
    for pid in "$@"; do
      forebay_alive "$pid" && { sleep 0.1; continue 2; }
    done
    break
  done
  for path in "${segments[@]}"; do
    [[ -O $path || $(stat -c %u -- "$path" 2>/dev/null) == "$SLURM_JOB_UID" ]] || continue
    grep -qsF -- "$path" /proc/[0-9]*/maps || rm -f -- "$path"
  done
  for pid in "$@"; do
    forebay_alive "$pid" && return 1
  done
  return 0
}

# Whether a process lives and is no zombie.
forebay_alive() {
  local state
  state=$(sed -n 's/^State:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null)
  [[ -n $state && $state != Z* && $state != X* ]]
}

# Remove a lease's own folders and named segments, if they are the job's user's.
forebay_remove_files() {
  local lease=$1 path
  for path in "$forebay_tmp/forebay-$lease" "$forebay_tmp/forebay-$lease".* \
    "$forebay_shm/forebay-$lease" "$forebay_shm/forebay-$lease".*; do
    [[ -e $path && ! -L $path && $(stat -c %u -- "$path" 2>/dev/null) == "$SLURM_JOB_UID" ]] || continue
    rm -rf --one-file-system -- "$path" && forebay_log "removed $path"
  done
  return 0
}
