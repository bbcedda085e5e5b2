#!/bin/sh
# The entrypoint of weir's image: from root to the user weir with CAP_NET_ADMIN and, where the container has it, CAP_NET_RAW.
#
# A file capability on node would not do: `ip`, which weir starts, would get nothing of it. Ambient capabilities are what children
# inherit, and only a process that has them can set them up; so the container starts as root, and what follows does not run as root.
set -eu

# Numbers of <linux/capability.h>, in the set that this container is bounded by.
bounding=$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
has() { [ $((0x$bounding >> $1 & 1)) = 1 ]; }
setgid=6 setuid=7 setpcap=8 net_admin=12 net_raw=13

# Started as somebody else (docker run --user), or without what a change of user takes: weir as it is.
if [ "$(id -u)" != 0 ] || ! has $setgid || ! has $setuid || ! has $setpcap; then
  exec weir "$@"
fi

# A volume or tmpfs comes as root's.
chown weir:weir /run/weir 2>/dev/null || true

kept=
if has $net_admin; then kept=+net_admin; fi
if has $net_raw; then kept=${kept:+$kept,}+net_raw; fi
exec setpriv --reuid weir --regid weir --clear-groups --no-new-privs \
  --inh-caps "-all${kept:+,$kept}" --ambient-caps "-all${kept:+,$kept}" --bounding-set "-all${kept:+,$kept}" \
  weir "$@"
