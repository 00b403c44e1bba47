#!/bin/sh
# Makes a manual page of what a program prints with --help, and for its title of the first part of its line in README.md's table of
# programs, without links.
# usage: manual.sh PROGRAM README VERSION PAGE
set -eu
name=${1##*/} page=$4
about=$(sed -n "s/^| \`$name [^\`]*\` | \(.*\) |\$/\1/p" "$2" | sed 's/\[\([^]]*\)\]([^)]*)/\1/g; s/[;.] .*//')
[ -n "$about" ] || { echo "manual: $2: no line for \`$name\` in the table of programs" >&2; exit 1; }
text=$("$1" --help)
mkdir -p "${page%/*}"
trap 'rm -f "$page.partial"' EXIT
printf '%s\n' "$text" | awk -v name="$name" -v about="$about" -v version="$3" '
    function plain(s) {
        gsub(/\\/, "\\e", s)
        gsub(/-/, "\\-", s)
        gsub(/`/, "", s)
        return s ~ /^[.\047]/ ? "\\&" s : s
    }
    function section(title) { print ".SH " title; within = title }
    BEGIN {
        print ".TH " toupper(name) " 1 \"\" \"PatchStep " version "\" PatchStep"
        section("NAME")
        print plain(name) " \\- " plain(about)
        section("SYNOPSIS")
        print ".nf"
    }
    within == "SYNOPSIS" && /./ { print plain(substr($0, 8)); next } # behind "usage: ", and as much on further lines
    within == "SYNOPSIS" { print ".fi"; within = ""; next }
    /^[Ee]xit codes: / { section("EXIT STATUS"); print plain(substr($0, 13)); next }
    /^  (-|[A-Z]+  )/ { # an option, or what the command line takes besides
        if (within != "OPTIONS") {
            section("OPTIONS")
        }
        line = substr($0, 3)
        blank = 0
        match(line, /^[A-Z]+|^--[a-z-]+(, --[a-z-]+)*( [A-Z][^ ]*| [a-z]+\|[a-z|]+| section\.key=value)?/) # with what it takes
        print ".TP\n.B " plain(substr(line, 1, RLENGTH))
        line = substr(line, RLENGTH + 1)
        sub(/^ +/, "", line)
        if (line != "") {
            print plain(line)
        }
        next
    }
    /^$/ { blank = 1; next }
    {
        if (within != "OPTIONS" && within != "DESCRIPTION") {
            section("DESCRIPTION")
        } else if (blank) {
            print ".PP"
        }
        blank = 0
        sub(/^ +/, "")
        print plain($0)
    }' >"$page.partial"
mv "$page.partial" "$page"
