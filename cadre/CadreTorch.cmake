# Everything above the torch line. The libraries use per-operator ATen headers; train, examples and
# tests share one precompiled torch/torch.h.
set(torch_folders group buckets mesh parallel data checkpoint)
cadre_sources(torch_sources library ${torch_folders})
if(NOT torch_sources)
  return()
endif()

add_library(cadre_torch_objects OBJECT ${torch_sources})
target_include_directories(cadre_torch_objects PUBLIC ${CMAKE_SOURCE_DIR})
target_link_libraries(cadre_torch_objects PRIVATE cadre_options PUBLIC LibTorch::LibTorch)
set_target_properties(cadre_torch_objects PROPERTIES JOB_POOL_COMPILE torch_compile)

add_library(cadre SHARED $<TARGET_OBJECTS:cadre_torch_objects>)
target_link_libraries(cadre PUBLIC cadre_core LibTorch::LibTorch)

# The precompiled header, compiled once and reused.
cadre_precompiled_headers(cadre_torch_pch <torch/torch.h>)
target_link_libraries(cadre_torch_pch PUBLIC LibTorch::LibTorch)

# The trainer: the only place where the wrappers meet.
cadre_sources(train_sources library train)
if(train_sources)
  find_package(tomlplusplus REQUIRED)
  add_library(cadre_train_objects OBJECT ${train_sources})
  target_link_libraries(cadre_train_objects PRIVATE cadre_options PUBLIC cadre_torch_objects
                                                                        nlohmann_json::nlohmann_json)
  cadre_reuse_precompiled_headers(cadre_train_objects cadre_torch_pch)
  set_target_properties(cadre_train_objects PROPERTIES JOB_POOL_COMPILE torch_compile)
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/train/cadre_train_main.cpp)
    add_executable(cadre_train train/cadre_train_main.cpp $<TARGET_OBJECTS:cadre_train_objects>)
    set_target_properties(cadre_train PROPERTIES OUTPUT_NAME cadre-train RUNTIME_OUTPUT_DIRECTORY
                                                 ${CMAKE_BINARY_DIR}/libexec/cadre)
    target_link_libraries(cadre_train PRIVATE cadre cadre_options nlohmann_json::nlohmann_json)
    cadre_reuse_precompiled_headers(cadre_train cadre_torch_pch)
  endif()
endif()

# cadre_add_torch_test(TEST BINARY source...): few big binaries, because linking and the start of
# libtorch dominate.
function(cadre_add_torch_test test name)
  add_executable(${name} ${ARGN} $<TARGET_OBJECTS:cadre_torch_objects>
                         $<TARGET_OBJECTS:cadre_core_objects>)
  if(TARGET cadre_testing)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:cadre_testing>)
  endif()
  target_link_libraries(
    ${name} PRIVATE LibTorch::LibTorch cadre_options GTest::gtest_main GTest::gmock OpenSSL::Crypto
                    ZLIB::ZLIB Threads::Threads rt nlohmann_json::nlohmann_json)
  # By file: their targets would bring include folders that the torch wheel's fmt shadows.
  target_link_libraries(${name} PRIVATE $<TARGET_LINKER_FILE:fmt::fmt>
                                        $<TARGET_LINKER_FILE:spdlog::spdlog>)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_compile_definitions(
    ${name} PRIVATE CADRE_SOURCE_DIR="${CMAKE_SOURCE_DIR}" CADRE_BINARY_DIR="${CMAKE_BINARY_DIR}")
  cadre_reuse_precompiled_headers(${name} cadre_torch_pch)
  set_target_properties(${name} PROPERTIES JOB_POOL_COMPILE torch_compile)
  add_test(NAME ${test} COMMAND ${name})
  set_tests_properties(${test} PROPERTIES TIMEOUT 600 LABELS torch)
endfunction()

if(CADRE_WITH_TESTS)
  foreach(folder IN LISTS torch_folders ITEMS train)
    cadre_sources(tests test ${folder})
    if(tests)
      cadre_add_torch_test(${folder} cadre_${folder}_test ${tests})
    endif()
  endforeach()
  if(TARGET cadre_train_test)
    target_sources(cadre_train_test PRIVATE $<TARGET_OBJECTS:cadre_train_objects>)
  endif()
endif()
