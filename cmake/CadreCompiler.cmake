# Warnings, sanitizers, ccache and the number of jobs.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

# Each call of the compiler goes through ccache, where there is one, and into a log of CPU seconds.
if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_SOURCE_DIR}/tools/compile
                                  ${CMAKE_BINARY_DIR}/compile_seconds.txt ${CMAKE_SOURCE_DIR})
endif()

# Compiling a file that includes torch/torch.h needs about 1.6 GB, so the number of parallel
# compilations is limited by the machine's memory.
cmake_host_system_information(RESULT cadre_memory_mb QUERY AVAILABLE_PHYSICAL_MEMORY)
math(EXPR cadre_torch_jobs "${cadre_memory_mb} / 1800")
if(cadre_torch_jobs LESS 1)
  set(cadre_torch_jobs 1)
endif()
set_property(GLOBAL PROPERTY JOB_POOLS torch_compile=${cadre_torch_jobs})

add_library(cadre_options INTERFACE)
target_compile_options(cadre_options INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor
                                               -Woverloaded-virtual -Wno-missing-field-initializers)
if(CADRE_WERROR)
  target_compile_options(cadre_options INTERFACE -Werror)
endif()
if(CADRE_SANITIZE)
  add_compile_options(-fsanitize=${CADRE_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  # g++ 12 gives wrong warnings (uninitialized values, strings that overflow) for branches that the
  # sanitizers insert.
  add_compile_options(
    "$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-array-bounds;-Wno-stringop-overflow>")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # clang++ 16 does not define the macros of g++. Its check of virtual tables opens a pipe to
    # probe memory; in a test that has used up all descriptors this fails, and it reports every
    # object.
    foreach(sanitizer address thread)
      if(CADRE_SANITIZE MATCHES ${sanitizer})
        string(TOUPPER ${sanitizer} sanitizer)
        add_compile_definitions(__SANITIZE_${sanitizer}__)
      endif()
    endforeach()
    if(CADRE_SANITIZE MATCHES "undefined")
      add_compile_options(-fno-sanitize=vptr)
    endif()
  endif()
  add_link_options(-fsanitize=${CADRE_SANITIZE})
endif()

# For tests. Optimizing them, and watching them as well as what they test, takes most of the time to
# compile them. Where the library is compiled by g++, the tests are compiled by clang++, if there is
# one: with its precompiled headers it takes a quarter of the time, and both compilers see every
# header.
add_library(cadre_test_options INTERFACE)
target_link_libraries(cadre_test_options INTERFACE cadre_options)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CADRE_SANITIZE)
  find_program(CADRE_TEST_COMPILER clang++-16 DOC "Compiles the tests; empty: the compiler of the library")
endif()
# A precompiled header that another compiler has made would stop the build, so it is removed.
if(NOT "${CADRE_TEST_COMPILER}" STREQUAL "${CADRE_LAST_TEST_COMPILER}")
  file(GLOB old_test_headers ${CMAKE_BINARY_DIR}/cadre/CMakeFiles/*_test_pch.dir/*.gch)
  if(old_test_headers)
    file(REMOVE ${old_test_headers})
  endif()
endif()
set(CADRE_LAST_TEST_COMPILER "${CADRE_TEST_COMPILER}" CACHE INTERNAL "The compiler of the last configuration")
if(CADRE_SANITIZE MATCHES "undefined")
  target_compile_options(cadre_test_options INTERFACE -fno-sanitize=undefined)
endif()
if(CADRE_SANITIZE)
  target_compile_options(cadre_test_options INTERFACE -O0)
elseif(CADRE_TEST_COMPILER)
  target_compile_options(cadre_test_options INTERFACE $<$<CONFIG:RelWithDebInfo>:-O0;-g0>
                                                      -fpch-instantiate-templates
                                                      -Wno-unknown-warning-option)
elseif(NOT CADRE_SANITIZE)
  # With -Og, g++ 12 warns wrongly of values that may not be initialized.
  target_compile_options(cadre_test_options INTERFACE $<$<CONFIG:RelWithDebInfo>:-Og;-g0>
                                                      -Wno-maybe-uninitialized)
endif()

# cadre_compile_as_test(TARGET): compiles TARGET with the tests' compiler and their options.
function(cadre_compile_as_test target)
  target_link_libraries(${target} PRIVATE cadre_test_options)
  if(CADRE_TEST_COMPILER)
    list(GET CMAKE_CXX_COMPILER_LAUNCHER 0 launcher)
    list(SUBLIST CMAKE_CXX_COMPILER_LAUNCHER 1 -1 arguments)
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER
                                               "${launcher};--with;${CADRE_TEST_COMPILER};${arguments}")
  endif()
endfunction()

# cadre_precompiled_headers(NAME header...): compiles the headers once, for targets that reuse NAME.
# The presets asan and tsan disable this (CMAKE_DISABLE_PRECOMPILE_HEADERS): it would save clang++
# at most a second for each unit, and CMake passes absolute paths of the headers (-Xclang), with
# which a compiler cache cannot reuse objects from another checkout.
function(cadre_precompiled_headers name)
  file(WRITE ${CMAKE_BINARY_DIR}/${name}.cpp "")
  add_library(${name} OBJECT ${CMAKE_BINARY_DIR}/${name}.cpp)
  target_link_libraries(${name} PRIVATE cadre_options)
  target_precompile_headers(${name} PRIVATE ${ARGN})
endfunction()

# cadre_precompiled_test_headers() does this for tests. The precompiled header contains the text of
# the headers; otherwise clang++ would read them again by their absolute paths, and an object from a
# compiler cache could not be used after its checkout is gone.
function(cadre_precompiled_test_headers name)
  cadre_precompiled_headers(${name} ${ARGN})
  cadre_compile_as_test(${name})
  target_link_libraries(${name} PRIVATE GTest::gtest)
  target_compile_options(${name} PRIVATE -fPIC)
  if(CADRE_TEST_COMPILER OR CADRE_SANITIZE)
    target_compile_options(${name} PRIVATE "SHELL:-Xclang -fmodules-embed-all-files")
  endif()
endfunction()

function(cadre_reuse_precompiled_headers target name)
  target_precompile_headers(${target} REUSE_FROM ${name})
  target_compile_options(${target} PRIVATE -fPIC)  # as the precompiled headers, also in programs
endfunction()
