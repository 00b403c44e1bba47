#!/usr/bin/env bash
# The table of the paper (Nie et al. 2023, table 3, PatchTST/42), trained again: every horizon of every data set of the field whose
# CSV lies in DIR, with several seeds; ours beside the paper's figures, with wall clock.
# usage: scripts/paper_table.sh DIR [option]...
#   DIR                       holds any of ETTh1, ETTh2, ETTm1, ETTm2, weather, electricity, traffic and national_illness .csv
#   --seeds LIST              such as "1 2 3 4 5"; else "1 2 3"
#   --datasets LIST           such as "ETTh1 weather"; else all that are in DIR
#   --horizons LIST           of every data set; else "96 192 336 720", of national_illness "24 36 48 60"
#   --runs FOLDER             where data, runs and their logs are kept; else runs/paper
#   --device D, --precision P, --set section.key=value
#                             for every run: train's --device and --set, and runtime.precision; --set may be repeated
# It needs the programs of scripts/build.sh (PS_PROGRAMS: their folder, build/auto if unset), bash 5 and python3. Settings are those
# of configs/*_paper.yaml. MSE and MAE are test.json's over full batches, of the weights that were best in validation.
# A run that is done is not run again, one that was interrupted goes on: the same command does the rest. A run prints a line and
# writes the rest to log.txt in its folder, FOLDER/DATASET_HORIZON_SEED. Exit 0: all runs are done; 130: stopped by a signal; else
# the code of the last run that failed.
set -euo pipefail
export LC_ALL=C
begun=${EPOCHREALTIME/./}

fail() {
    echo "paper_table: $1" >&2
    exit 2
}
known="ETTh1 ETTh2 ETTm1 ETTm2 weather electricity traffic national_illness"
folder='' seeds="1 2 3" datasets='' horizons='' runs='' device=() sets=()
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        --seeds | --datasets | --horizons | --runs | --device | --precision | --set)
            [ $# -ge 2 ] || fail "$1 needs a value (--help)"
            case $1 in
                --seeds) seeds=$2 ;;
                --datasets) datasets=$2 ;;
                --horizons) horizons=$2 ;;
                --runs) runs=$(realpath -m -- "$2") ;;
                --device) device=(--device "$2") ;;
                --precision) sets+=(--set "runtime.precision=$2") ;;
                --set) sets+=(--set "$2") ;;
            esac
            shift ;;
        -*) fail "$1: unknown (--help)" ;;
        *)
            [ -z "$folder" ] || fail "$1: one folder of CSV files at most (--help)"
            [ -d "$1" ] || fail "$1: no such folder"
            folder=$(realpath -- "$1") ;;
    esac
    shift
done
[ -n "$folder" ] || fail "name the folder of the CSV files (--help)"
for number in $seeds $horizons; do
    [[ $number =~ ^[0-9]{1,9}$ ]] || fail "$number: seeds and horizons are whole numbers"
done
[ -n "${seeds// /}" ] || fail "--seeds: none given"
for name in $datasets; do
    [[ " $known " == *" $name "* ]] || fail "$name: not one of $known"
    [ -f "$folder/$name.csv" ] || fail "$folder/$name.csv: no such file"
done
if [ -z "$datasets" ]; then
    for name in $known; do
        [ ! -f "$folder/$name.csv" ] || datasets+=" $name"
    done
    [ -n "$datasets" ] || fail "$folder: none of $known .csv lies there"
fi

cd "$(dirname "$0")/.."
programs=${PS_PROGRAMS:-build/auto} runs=${runs:-$PWD/runs/paper}
[ -x "$programs/train" ] || fail "$programs/train is missing: build first with scripts/build.sh"
command -v python3 >/dev/null || fail "python3 is missing: scripts/setup.sh --plots installs it"
mkdir -p "$runs"

# config, all and own of a data set: the authors' settings. ETTm is trained as weather is, but by another schedule.
settings() {
    all=${horizons:-96 192 336 720} own=()
    case $1 in
        ETTh1 | ETTh2) config=etth1_paper ;;
        ETTm1 | ETTm2)
            config=weather_paper
            own=(data.split='[34560, 11520, 11520]' data.season=96 optim.schedule=onecycle optim.pct_start=0.4 optim.beta1=0.9) ;;
        national_illness) config=illness_paper all=${horizons:-24 36 48 60} ;;
        *) config=$1_paper ;;
    esac
    if [[ $1 != ETT* ]]; then # 0.7, 0.1 and 0.2 of the rows, whatever their number, rounded as the field does
        local rows=$(($(grep -c . "$folder/$1.csv") - 1))
        own=(data.split="[$((rows * 7 / 10)), $((rows - rows * 7 / 10 - rows * 2 / 10)), $((rows * 2 / 10))]")
    fi
    own=("${own[@]/#/--set=}" --set="data.path=$runs/$1.h5")
}

# Rows count as they stand, without their dates: of weather's one is there twice, which import_csv refuses.
import() {
    [ ! -e "$runs/$1.h5" ] || return 0
    local first=1
    case $(head -n 1 "$folder/$1.csv") in
        date,*) first=2 ;;
    esac
    cut -d, -f$first- "$folder/$1.csv" | "$programs/import_csv" /dev/stdin "$runs/$1.h5" >/dev/null || {
        echo "paper_table: $folder/$1.csv: not imported" >&2
        return 1
    }
}

# Trains into $run; adds the seconds of it to its seconds.txt.
train() {
    local begin=${EPOCHREALTIME/./} resume=() stopped='' code=0 command
    command="train configs/$config.yaml ${own[*]} ${device[*]} ${sets[*]} --set model.pred_len=$horizon --set train.seed=$seed"
    if [ -e "$run/test.json" ] || compgen -G "$run/checkpoints/last*.h5" >/dev/null; then
        if [ "$(cat "$run/command.txt" 2>/dev/null)" != "$command" ]; then
            echo "paper_table: $run was trained with other settings (its command.txt): name another folder with --runs" >&2
            return 2
        fi
        resume=(--resume)
    fi
    [ ! -e "$run/test.json" ] || return 0
    mkdir -p "$run"
    printf '%s\n' "$command" >"$run/command.txt"
    "$programs/train" "configs/$config.yaml" "${own[@]}" "${device[@]}" "${sets[@]}" --set "model.pred_len=$horizon" \
        --set "train.seed=$seed" --run-dir "$run" "${resume[@]}" >>"$run/log.txt" 2>&1 &
    local child=$!
    trap 'stopped=1; kill -TERM $child 2>/dev/null || true' INT TERM HUP
    wait "$child" || code=$?
    [ -z "$stopped" ] || wait "$child" 2>/dev/null || true # until it has written its checkpoint
    trap - INT TERM HUP
    local milliseconds=$(((${EPOCHREALTIME/./} - begin) / 1000))
    printf '%d.%03d\n' $((milliseconds / 1000)) $((milliseconds % 1000)) >>"$run/seconds.txt"
    if [ -n "$stopped" ]; then
        echo "paper_table: stopped; the same command goes on" >&2
        exit 130
    fi
    [ $code -eq 0 ] || echo "paper_table: exit code $code: $(tail -n 1 "$run/log.txt") ($run/log.txt)" >&2
    return $code
}

total=0 done=0 result=0 rows=()
for name in $datasets; do
    settings "$name"
    for horizon in $all; do
        rows+=("${name}_$horizon")
    done
done
total=$((${#rows[@]} * $(wc -w <<<"$seeds")))
for name in $datasets; do
    settings "$name"
    import "$name" || { result=3; continue; }
    for horizon in $all; do
        for seed in $seeds; do
            run=$runs/${name}_${horizon}_$seed code=0 before=''
            done=$((done + 1))
            [ ! -e "$run/test.json" ] || before=", done before"
            train || { result=$?; continue; }
            echo "$name, horizon $horizon, seed $seed ($done of $total$before): $(python3 scripts/paper_table.py run "$run")"
        done
    done
done
echo
python3 scripts/paper_table.py table "$runs" "$seeds" "${rows[@]}"
milliseconds=$(((${EPOCHREALTIME/./} - begun) / 1000))
echo "this command: $((milliseconds / 1000)).$((milliseconds % 1000 / 100)) s"
exit $result
