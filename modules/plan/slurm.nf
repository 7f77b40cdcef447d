// Slurm is asked about every kind of job before the first is submitted (sbatch --test-only): a wrong account,
// partition, GPU request or time limit is told at once and not hours later, by the job that needs it.

// name and labels of each process
def processes() {
    return files("${projectDir}/modules/local/*.nf").collect { path ->
        def labels = (path.text =~ /(?m)^ +label '(\w+)'/).collect { found -> found[1] }
        [name: (path.text =~ /process (\w+) \{/)[0][1], labels: labels]
    }
}

def fits(rule, text) {
    return rule.startsWith('!') ? !(text ==~ rule.substring(1)) : text ==~ rule
}

// the settings of one process: what holds for all, then for its labels, then for its name
def settingsOf(scope, one) {
    def chosen = { kind, texts ->
        def holds = { rule -> texts.any { text -> fits(rule, text) } }
        scope.findAll { key, _value -> key.startsWith(kind) && holds.call(key.substring(kind.length())) }.values()
    }
    return (chosen.call('withLabel:', one.labels) + chosen.call('withName:', [one.name]))
        .inject(scope.findAll { key, _value -> !key.startsWith('with') }) { all, more -> all + more }
}

// the value at the first attempt; null if it cannot be known before the task is
def valueOf(settings, name, given) {
    def value   = settings[name]
    def context = [task: [attempt: 1, cpus: 1], params: given]
    try {
        return value instanceof Closure ? value.rehydrate(context, context, context).call() : value
    } catch (Exception problem) {
        log.debug "${name}: ${problem.message}"
        return null
    }
}

def least(values) {
    def known = values.findAll { value -> value != null }
    return known ? known.min() : null
}

// what Nextflow writes at the head of a job
def headOf(settings, given, perCpu) {
    def limits = settings.resourceLimits ?: [:]
    def cpus   = least([valueOf(settings, 'cpus', given), limits.cpus]) ?: 1
    def times  = [valueOf(settings, 'time', given), limits.time]
    def sizes  = [valueOf(settings, 'memory', given), limits.memory]
    def time   = least(times.collect { value -> value ? value as nextflow.util.Duration : null })
    def memory = least(sizes.collect { value -> value ? value as nextflow.util.MemoryUnit : null })
    def queue  = valueOf(settings, 'queue', given)
    def lines  = cpus > 1 ? ["-c ${cpus}"] : []
    if (time) { lines << "-t ${time.format('HH:mm:ss')}" }
    if (memory) { lines << (perCpu ? "--mem-per-cpu ${memory.toMega().intdiv(cpus)}M" : "--mem ${memory.toMega()}M") }
    if (queue) { lines << "-p ${queue}" }
    lines += [valueOf(settings, 'clusterOptions', given)].flatten().findAll()
    def texts  = lines.collect { line -> "${line}".toString() }
    return [lines: texts, time: time, queue: queue ? "${queue}".toString() : null]
}

// exit code and words of a command that reads `words`, or null if it takes too long
def answerOf(command, words) {
    def process = new ProcessBuilder(command).redirectErrorStream(true).start()
    try {
        process.outputStream.withStream { stream -> stream.write(words.bytes) }
    } catch (java.io.IOException problem) {
        log.debug "${command[0]} ended before it had read everything: ${problem.message}"
    }
    if (process.waitFor(20, java.util.concurrent.TimeUnit.SECONDS)) {
        return [code: process.exitValue(), text: process.inputStream.text.trim()]
    }
    process.destroyForcibly()
    return null
}

// which parameter to change, by what Slurm says
def remedy(text, gpu, trains) {
    def side = gpu ? 'gpu' : 'cpu'
    if (text =~ /(?i)time limit/) {
        return trains ? '--train_time' : "--${side}_queue, or give process.resourceLimits in --site_config"
    }
    if (text =~ /(?i)partition/ && !(text =~ /(?i)account/)) { return "--${side}_queue" }
    if (text =~ /(?i)account/) { return "--slurm_account and --${side}_queue" }
    if (text =~ /(?i)gres|generic resource|feature|constraint|qos|option/) { return "--${side}_options" }
    if (text =~ /(?i)node configuration|memory|cpu|processors|node count/) {
        return gpu ? '--gpu_options, --train_cpus, --train_memory, --num_nodes or --gpu_queue' :
            '--cpu_queue, or give process.resourceLimits in --site_config'
    }
    return "--slurm_account, --${side}_queue or --${side}_options"
}

// what Slurm says of a job that it does not take
def complaintOf(text) {
    return text.readLines()
        .collect { line -> line.replaceAll(/^(sbatch: )?(error: |allocation failure: )?/, '') }
        .findAll { line -> !line.startsWith('Try "') }.unique().join('; ')
}

def isNoAnswer(text) {
    return text =~ /(?i)unable to contact|timed out|connection refused|nodes are busy|zero bytes|temporarily/
}

// longest time of the partitions, by name: where Slurm does not enforce its limits, a longer job is taken and waits for
// ever
def timeLimits() {
    def answer = answerOf(['sinfo', '--noheader', '--format', '%P|%l'], '')
    if (!answer || answer.code) { return [:] }
    return answer.text.readLines().findAll { line -> line.count('|') == 1 }
        .collectEntries { line -> [(line.split(/\|/)[0]): secondsOf(line.split(/\|/)[1])] }
}

// [D-]HH:MM:SS or MM:SS; null: no limit, or not known
def secondsOf(text) {
    if (!(text ==~ /(\d+-)?\d+(:\d+){1,2}/)) { return null }
    def days  = text.contains('-') ? text.split('-')[0] as long : 0
    def parts = text.split('-')[-1].split(':').collect { part -> part as long }
    return parts.inject(0L) { sum, part -> sum * 60 + part } + days * 86400
}

def tooLong(head, limits) {
    def usual  = limits.keySet().findAll { name -> name.endsWith('*') } as List
    def asked  = head.queue ? head.queue.split(',') as List : usual
    def bounds = asked.collect { name -> limits.containsKey(name) ? limits[name] : limits["${name}*".toString()] }
    if (!head.time || !bounds || null in bounds || head.time.toSeconds() <= bounds.max()) { return null }
    def bound  = nextflow.util.Duration.of(bounds.max() * 1000)
    return "time limit ${head.time} is above that of partition ${asked.join(',') - '*'}, ${bound}"
}

// given: params; scope and executor: the configuration's
def askSlurm(given, scope, executor) {
    def perCpu = executor?.perCpuMemAllocation
    def kinds  = processes().collect { one -> one + headOf(settingsOf(scope, one), given, perCpu) }
        .groupBy { one -> one.lines }
    def limits = null
    def problems = []
    kinds.each { lines, same ->
        def gpu  = 'gpu' in same[0].labels
        def who  = same.collect { one -> one.name }.join(', ')
        def answer
        try {
            def head = lines.collect { line -> "#SBATCH ${line}" }.join('\n')
            answer = answerOf(['sbatch', '--test-only'], "#!/bin/bash\n${head}\ntrue\n".toString())
        } catch (java.io.IOException problem) {
            error("there is no sbatch on this machine (${problem.message.readLines()[0]}); " +
                'start where jobs can be submitted, or use -profile standard')
        }
        if (!answer || answer.code && isNoAnswer(answer.text)) {
            def why = answer ? answer.text.readLines()[-1] : 'no answer in 20 s'
            log.warn "Slurm could not be asked about the jobs of ${who}: ${why}"
            return
        }
        def said = answer.code ? complaintOf(answer.text) : null
        if (!said) {
            limits = limits ?: timeLimits()
            said   = tooLong(same[0], limits)
        }
        if (said) {
            def change = remedy(said, gpu, 'process_gpu' in same[0].labels)
            problems << "${who}: ${said}: change ${change}\n    sbatch ${lines.join(' ')}"
        }
    }
    if (problems) {
        error('Slurm does not take these jobs (--check_slurm false submits them all the same):' +
            "\n  ${problems.join('\n  ')}")
    }
}
