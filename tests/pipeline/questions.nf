// Answers questions, one a line of standard input: what the workflow refuses before its first task, or a whole recipe.

include { readParameters                              } from './modules/plan/parameters'
include { expand; overlay; parseOverrides; readPreset } from './modules/plan/recipes'
include { prepare; readPlan                           } from './modules/plan/plan'

def refusalOf(one) {
    def metadata = [profile: workflow.profile, stubRun: one.stub, commandLine: workflow.commandLine,
        workDir: workflow.workDir, launchDir: file(one.folder), projectDir: workflow.projectDir,
        manifest: workflow.manifest, nextflow: workflow.nextflow]
    try {
        def given = readParameters(params + one.given, file("${projectDir}/nextflow_schema.json"), metadata)
        prepare(readPlan(given, metadata), given, metadata)
    } catch (Exception refusal) {
        return org.codehaus.groovy.runtime.StackTraceUtils.extractRootCause(refusal).message
    }
    return null
}

def answerTo(one) {
    return one.preset ? overlay(readPreset(one.preset, one.folder), expand(parseOverrides(one.overrides))) : refusalOf(one)
}

workflow {
    System.in.eachLine { line ->
        def answer = answerTo(new groovy.json.JsonSlurper().parseText(line))
        println "answer: ${groovy.json.JsonOutput.toJson([answer])}"
    }
}
