# Shell functions that show the progress of long commands: a line every few seconds, also without a
# terminal.
readonly progress_seconds=5

# Runs a command that may take long: with_progress "setup: installing torch" command... Prints the
# text, and repeats it every few seconds with the elapsed time. Prints the command's output only if
# it fails.
with_progress() {
  local what="$1" log ticker code=0
  shift
  log="$(mktemp)"
  echo "$what"
  # The loop also ends when this shell ends. Its `sleep` must not keep the output pipe open.
  (start=$SECONDS
   while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
     (((SECONDS - start) % progress_seconds)) || echo "$what: $((SECONDS - start)) s"
   done) &
  ticker=$!
  "$@" >"$log" 2>&1 || code=$?
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  if [ "$code" != 0 ]; then cat "$log" >&2; fi
  rm -f "$log"
  return "$code"
}

# Reads what ninja prints with NINJA_STATUS="[%f/%t] ": every few seconds it says how many files are
# done, and prints every other line, such as an error of the compiler, at once.
ninja_progress() {
  local line text="" code files="" shown="" start=$SECONDS next=$((SECONDS + progress_seconds))
  while true; do
    code=0
    IFS= read -r -t 1 line || code=$?
    text+="$line"  # after a time-out it may be a part of a line
    if ((code > 128)); then
      :  # nothing new within the second
    elif [[ "$text" =~ ^\[([0-9]+)/([0-9]+)\]\  ]]; then
      files="${BASH_REMATCH[1]} of ${BASH_REMATCH[2]} files"
      text=""
    else
      if [ -n "$text" ] && [[ "$text" != "ninja: no work"* ]]; then printf '%s\n' "$text"; fi
      text=""
    fi
    if ((code != 0 && code <= 128)); then break; fi  # the end of the input
    if ((SECONDS >= next)) && [ -n "$files" ]; then
      echo "build: $files, $((SECONDS - start)) s"
      shown=yes
      next=$((SECONDS + progress_seconds))
    fi
  done
  if [ -n "$shown" ]; then echo "build: $files, $((SECONDS - start)) s"; fi
}
