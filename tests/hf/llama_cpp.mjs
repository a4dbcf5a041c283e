// node llama_cpp.mjs NODE_LLAMA_CPP MODEL.gguf < texts.json: prints [{ids, next}] as JSON.
// `ids`: llama.cpp's tokens of a text, with what it adds to a prompt; `next`: the likeliest after.
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const [folder, modelPath] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(`${folder}/dist/index.js`).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 128});
const sequence = context.getSequence();

const answers = [];
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
    const ids = model.tokenize(text, false);
    const first = model.tokens.shouldPrependBosToken ? [model.tokens.bos] : [];
    await sequence.clearHistory();
    const last = await sequence.controlledEvaluate([
        ...[...first, ...ids].slice(0, -1),
        [[...first, ...ids].at(-1), {generateNext: {token: true, options: {temperature: 0}}}],
    ]);
    answers.push({ids: [...first, ...ids], next: last.at(-1)?.next?.token ?? null});
}
console.log(JSON.stringify(answers));
process.exit(0);
