// What people give (cells of the sheet, parameters, folders) ends up in shell scripts, at the head of a Slurm job and
// in file names. Which characters it may hold is told here, before anything is made.
// Without includes, as several scripts include it: the strict parser takes no others twice.

// one word of a script, whatever is in it; conf/ writes the same, as it cannot call a function. Nextflow itself does so
// for inputs of a process
def quoted(value) {
    return "'" + "${value}".toString().replace("'", "'\\''") + "'"
}

// options of a command: meta.options, name → value, and those of meta.named, whose values are files; true: a switch
def told(meta, files) {
    def plain = meta.options.collect { name, value -> value == true ? "--${name}" : "--${name} ${quoted(value)}" }
    def named = [meta.named ?: [], [files].flatten()].transpose().collect { name, path -> "--${name} ${path}" }
    return (plain + named).join(' ')
}

// a message without line breaks, colours and marks that turn the writing direction
def shown(text) {
    return "${text}".toString()
        .replaceAll(/[\p{Cntrl}\p{Cf}\u2028\u2029]/) { mark -> String.format('\\u%04x', mark.codePointAt(0)) }
}

// Names that Nextflow stages wrongly: its own scripts quote spaces, quotes and most signs, but not what follows.
// In a container, commas and colons separate folders as well, and quotes and backslashes are not passed on.
def pathProblems(what, path, contained = false) {
    def text = "${path}".toString()
    if (text =~ /[\p{Cntrl}$*?\[\]{}]/) {
        return [shown("${what} '${text}': a path must not hold \$ * ? [ ] { } or control characters " +
            "such as line breaks; rename it")]
    }
    if (text.split('/').any { name -> name != name.stripTrailing() }) {
        return [shown("${what} '${text}': a name in a path must not end with a space; rename it")]
    }
    if (contained && text =~ /[,:'"\\]/) {
        return [shown("${what} '${text}' has one of , : ' \" \\ in its name, which a container cannot be told; " +
            'rename it')]
    }
    return []
}

// Nextflow puts bin/ of this folder into PATH, between double quotes
def projectProblems(folder) {
    if ("${folder}" =~ /["`\\:]/) {
        return [shown("the workflow lies in '${folder}': that path must not hold \" ` \\ or : as programs are " +
            'looked for there; move it')]
    }
    return pathProblems('the workflow lies in', folder)
}
