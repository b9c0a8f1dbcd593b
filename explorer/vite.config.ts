import { defineConfig } from "vite";

// Fixed names and a flat folder: the build is committed, and the same sources give the same bytes.
export default defineConfig({
  base: "/assets/",
  publicDir: "public",
  build: {
    outDir: process.env.OUT ?? "../src/torino/explorer/assets",
    emptyOutDir: false,
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"],
    modulePreload: { polyfill: false },
    rollupOptions: {
      output: {
        entryFileNames: "explorer.js",
        assetFileNames: "explorer[extname]",
        codeSplitting: false,
      },
    },
  },
});
