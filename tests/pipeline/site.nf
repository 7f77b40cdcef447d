// What the workflow thinks of profiles, images and Slurm's answers: cases.json → found.json, in one start of Nextflow.

include { askSlurm; headOf; processes; remedy; secondsOf; settingsOf; tooLong; valueOf } from './modules/plan/slurm'
include { folderProblems; imageProblems; profileProblems; siteWarnings } from './modules/plan/site'
include { imageRecord } from './modules/plan/image'
include { toolProblems } from './modules/plan/installed'

def configOf(profile) {
    def folder = java.nio.file.Path.of(params.project)
    return new nextflow.config.ConfigBuilder().setBaseDir(folder).setProfile(profile).buildConfigObject()
}

// what a profile says of the programs that run containers, with parameters as on the command line
def containersOf(one) {
    def folder  = java.nio.file.Path.of(params.project)
    def command = new nextflow.cli.CmdRun(params: one.given)
    def config  = new nextflow.config.ConfigBuilder().setBaseDir(folder).setCmdRun(command).setProfile(one.profile)
        .buildConfigObject()
    def scopes  = ['apptainer', 'singularity', 'docker', 'podman', 'conda'].collectEntries { name ->
        [(name): config[name].findAll { key, _value -> key in ['enabled', 'runOptions', 'envWhitelist'] }]
    }
    def gpu = settingsOf(config.process, [name: 'TRAIN', labels: ['gpu']])
    return scopes + [container: config.process.container, environment: config.process.conda?.toString(),
        gpu: valueOf(gpu, 'containerOptions', config.params) ?: '', queue: config.process.queue,
        institution: config.params.config_profile_name]
}

// what `nextflow config` prints
def textOf(profile) {
    def folder = java.nio.file.Path.of(params.project)
    def config = new nextflow.config.ConfigBuilder().setShowClosures(true).setBaseDir(folder).setProfile(profile)
        .buildConfigObject()
    return nextflow.util.ConfigHelper.toCanonicalString(config)
}

def orRefusal(question) {
    try { return question.call() }
    catch (Exception refusal) {
        return org.codehaus.groovy.runtime.StackTraceUtils.extractRootCause(refusal).message
    }
}

def jobsOf(config) {
    return processes().collectEntries { one ->
        def settings = settingsOf(config.process, one)
        def head = headOf(settings, config.params, config.executor?.perCpuMemAllocation).lines
            def gpu  = valueOf(settings, 'containerOptions', config.params) ?: ''
            [(one.name): [head: head, labels: one.labels, gpu: gpu, told: settings.ext?.args != null,
                published: settings.publishDir != null]]
    }
}

def afterwards(config, code, attempt, label) {
    def settings = settingsOf(config.process, [name: 'ANY', labels: [label]])
    def context  = [task: [attempt: attempt, exitStatus: code], params: [train_retries: '20']]
    return settings.errorStrategy.rehydrate(context, context, context).call()
}

workflow {
    def cases = new groovy.json.JsonSlurper().parseText(file('cases.json').text)
    def usual = configOf('standard')
    def slurm = configOf('test,slurm')
    def found = [
        jobs: cases.profiles.collectEntries { profile -> [(profile): jobsOf(configOf(profile))] },
        containers: cases.containers.collect { one -> containersOf(one) },
        problems: cases.problems.collect { one ->
            profileProblems(one.profiles, params + one.given) + imageProblems(one.profiles, one.given.container) +
                folderProblems(params + one.given)
        },
        config: textOf('test,slurm'),
        busy: orRefusal { -> askSlurm(slurm.params, slurm.process, slurm.executor) },
        images: cases.images.collect { name -> orRefusal { -> imageRecord(name) } },
        tools: cases.tools.collect { one -> toolProblems(one.names, one.given, new java.io.File(one.root)) },
        warnings: cases.warnings.collect { one -> siteWarnings(['slurm'], params + one, one.work ?: '/shared/work') },
        afterwards: cases.afterwards.collect { one -> afterwards(usual, one[0] ?: Integer.MAX_VALUE, one[1], one[2]) },
        remedies: cases.remedies.collect { one -> remedy(one[0], one[1], one[2]) },
        seconds: cases.seconds.collect { text -> secondsOf(text) },
        long: cases.long.collect { one -> tooLong([time: one[0] as nextflow.util.Duration, queue: one[1]], one[2]) },
    ]
    file('found.json').text = groovy.json.JsonOutput.toJson(found)
}
