#!/usr/bin/env bash
# What release/try.sh runs in a bare root, with an SDK in the folder `dotnet`, the packages in `packages` and a model beside it: new programs add
# them, and answer: bash try-nuget.sh VERSION
set -euo pipefail
cd "$(dirname "$0")"
version=$1
readonly VERSE="And I will tell you, sir, I will not be a man."

step() { printf '   %s\n' "$*"; }

# Nothing of a checkout is found instead, and no package from before.
unset NVFP4_LIB_PATH
export DOTNET_SYSTEM_GLOBALIZATION_INVARIANT=1 DOTNET_CLI_TELEMETRY_OPTOUT=1 DOTNET_SKIP_FIRST_TIME_EXPERIENCE=1 DOTNET_NOLOGO=1
export MSBUILDDISABLENODEREUSE=1 DOTNET_CLI_HOME=$PWD/home NUGET_PACKAGES=$PWD/home/packages LD_LIBRARY_PATH=$PWD/dotnet/ssl UseSharedCompilation=false
dotnet=$PWD/dotnet/sdk/dotnet
case $(uname -m) in
    aarch64) rid=linux-arm64 ;;
    *) rid=linux-x64 ;;
esac

# nuget.org cannot be reached.
echo '<configuration><packageSources><clear /></packageSources></configuration>' >nuget.config

# quietly COMMAND...: shows what it says if it fails.
quietly() { "$@" >log 2>&1 || { cat log; exit 1; }; }

# program LANGUAGE NAME PACKAGE: a new console program in the folder NAME that has the package, and as its source what comes from stdin.
program() {
    local language=$1 name=$2 package=$3 project
    quietly "$dotnet" new console --language "$language" --output "$name" --no-restore
    project=$(echo "$name/$name".*proj)
    quietly "$dotnet" add "$project" package "$package" --source "$PWD/packages"
    grep -qF "<PackageReference Include=\"$package\" Version=\"$version\" />" "$project"
    cat >"$(echo "$name"/Program.*)"
}

program "C#" answer LibNVFP4 <<'END'
using System;
using LibNVFP4;

class Program
{
    static void Main(string[] args)
    {
        using (Model model = Model.Load(args[0], new LoadOptions { Device = Device.Cpu }))
        using (var session = new Session(model))
        {
            session.Prefill(model.Tokenizer.Encode("HAMLET."));
            foreach (string piece in session.Stream(new GenerateOptions { Temperature = 0, MaxTokens = 24 }))
                Console.Write(piece);
        }
        Console.WriteLine();
        Console.WriteLine(Library.Version + " " + Library.Path);
    }
}
END
"$dotnet" run --project answer -- verse-10m >said
cat said
grep -qF "$VERSE" said
grep -q "^$version .*/runtimes/$rid/native/libNVFP4.so$" said
step "C#, $("$dotnet" --version) on $rid: a known answer"

# To be run elsewhere: for any platform with both libraries, and for this one with its own beside the program.
quietly "$dotnet" publish answer -nologo --output portable
quietly "$dotnet" publish answer -nologo --runtime $rid --self-contained false --output own
mkdir published
mv portable own published
"$dotnet" published/portable/answer.dll verse-10m | grep -qx "$version $PWD/published/portable/runtimes/$rid/native/libNVFP4.so"
"$dotnet" published/own/answer.dll verse-10m | grep -qx "$version $PWD/published/own/libNVFP4.so"
step "published: for any platform, and for $rid"

program "F#" pipe LibNVFP4.FSharp <<'END'
open LibNVFP4
open LibNVFP4.FSharp

[<EntryPoint>]
let main arguments =
    use model = arguments.[0] |> Model.loadOn Device.Cpu
    use session = new Session(model)
    session.Prefill(model.Tokenizer.Encode "HAMLET.")
    session.Stream(GenerateOptions(Temperature = 0.0f, MaxTokens = 24L)) |> Seq.iter (printf "%s")
    printfn ""
    0
END
"$dotnet" run --project pipe -- verse-10m >said
grep -F "$VERSE" said
step "F#: the same"
